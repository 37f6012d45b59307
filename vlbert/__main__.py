"""Run `vlbert` as `python -m vlbert`, for environments without the installed script."""

from vlbert.commands import main

if __name__ == "__main__":
    main()
