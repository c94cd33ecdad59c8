"""What runs have measured, so that people can read, check and pass it on: `report.html`, `report.json`,
`requests.csv`, `report.md`."""
