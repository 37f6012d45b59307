"""A package that only an extra brings is named with that extra, before anything is done."""

import sys

import pytest
from web import statuses

from storage.collect.fetch import DownloadSettings
from storage.object_store import open_store
from storage.programs import PackageMissing
from training.curves import draw_panels


@pytest.mark.parametrize(
    ("package", "extra", "use"),
    [
        ("boto3", "vlbert[pipeline]", lambda: open_store("s3://bucket/root")),
        ("aiohttp", "vlbert[pipeline]", lambda: statuses(["http://example.com/"], DownloadSettings())),
        ("matplotlib", "vlbert[attention]", lambda: draw_panels({"loss": {"words": [(1, 0.5)]}})),
    ],
)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch, package, extra, use):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(PackageMissing, match=f"needs {package}, which is not installed: pip install '") as missing:
        use()
    assert str(missing.value).endswith(f" '{extra}'")
    assert isinstance(missing.value, ValueError)  # which every program prints as one line
