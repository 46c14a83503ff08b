"""`python -m pdkv.cli` is `pd`."""

import sys

from pdkv.cli.main import main

sys.exit(main())
