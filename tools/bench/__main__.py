"""`python -m bench SUITE`: what the launcher's `./yard bench` starts."""

from bench.cli import main

if __name__ == "__main__":
    main()
