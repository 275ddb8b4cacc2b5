"""`python -m fusion_advisor`."""

from fusion_advisor.cli.app import main

if __name__ == "__main__":
    main()
