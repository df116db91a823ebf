"""`python -m nanscope` is `nanscope`."""

from nanscope.cli import main

if __name__ == "__main__":
    main()
