"""What tests of native code compile with."""

import shutil

from baton.engine.model.native.build import COMPILERS


def compiler() -> str:
    return next(found for name in COMPILERS if (found := shutil.which(name)))
