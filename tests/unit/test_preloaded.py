"""What the fork server imports is there: of a module that it does not find it says nothing, and children are slow."""

from __future__ import annotations

import sys

from pxrs.testing import preloaded


def test_all_modules_that_forked_children_share_are_imported() -> None:
    assert {*preloaded.OPENED_BY_NAME, *preloaded.OF_EXTRAS, preloaded.USED_BY_PYARROW} <= sys.modules.keys()
