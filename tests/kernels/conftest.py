"""Makes the helper modules of this directory importable by its tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
