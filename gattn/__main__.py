"""`python -m gattn`: what a bug report needs, and whether the results of this machine are right."""

from gattn.doctor import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
