"""Run a suite: `python -m bench SUITE`, which `./yard bench` starts."""

from bench.cli import main

if __name__ == "__main__":
    main()
