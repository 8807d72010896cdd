"""
``python -m qeffect`` is the ``qeffect`` command.
"""

from .cli import main

raise SystemExit(main())
