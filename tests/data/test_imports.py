import subprocess
import sys

import pytest

LIGHT = [
    "",
    ".collate",
    ".config",
    ".files",
    ".manifest",
    ".raw_records",
    ".shards",
    ".sources",
    ".stdlib",
    ".suites",
    ".types",
]


@pytest.mark.parametrize("modules", [[""], LIGHT])
def test_outrider_data_imports_no_heavy_package(modules: list[str]) -> None:
    """Reading a shard must not take the seconds that transformers and datasets need to import."""
    lines = [f"import outrider.data{module}" for module in modules]
    lines += ["import sys", "print(sorted({'transformers', 'datasets', 'pyarrow', 'huggingface_hub'} & sys.modules.keys()))"]
    result = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
