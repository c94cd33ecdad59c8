"""Reports of runs: `report.html`, `report.json`, `requests.csv` and `report.md`."""
