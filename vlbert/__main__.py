"""`python -m vlbert` is `vlbert`, also where no script of that name was installed."""

from vlbert.commands import main

if __name__ == "__main__":
    main()
