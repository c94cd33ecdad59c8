"""Baton with another KV layout version, as another release would have: `python -m ... ARGUMENTS OF baton`."""

from baton.cli.main import main
from baton.core.kv.kv_layout import LAYOUT_VERSION, KvLayout

OTHER_LAYOUT = LAYOUT_VERSION + 1
PROGRAM = "tests.integration.cluster.other_release"

if __name__ == "__main__":
    defaults = KvLayout.__init__.__kwdefaults__
    assert defaults is not None
    defaults["layout_version"] = OTHER_LAYOUT
    main()
