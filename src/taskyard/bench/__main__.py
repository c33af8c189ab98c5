"""`python -m taskyard.bench SUITE`: what the launcher's `./yard bench` starts."""

from taskyard.bench.cli import main

if __name__ == "__main__":
    main()
