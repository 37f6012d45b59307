"""`python -m storage.catalog`: the commands of storage/inventory.py."""

from storage.inventory import main

if __name__ == "__main__":
    main()
