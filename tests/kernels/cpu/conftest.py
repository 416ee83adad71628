"""Makes the helper modules of the directory above importable by its tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
