"""`python -m det_lightning` is the command line."""

from det_lightning.cli import main

if __name__ == "__main__":
    main()
