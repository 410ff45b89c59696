"""Many drafts, one target: which one is worth serving?"""

from harness.cli import run_app

if __name__ == "__main__":
    run_app("audition")
