import sys

from rlinf_lite.cli import main

sys.exit(main())
