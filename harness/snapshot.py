"""Does speculation leave the output unchanged?"""

from harness.cli import run_app

if __name__ == "__main__":
    run_app("snapshot")
