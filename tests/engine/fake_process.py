"""Run as a module: the engine process with a fake engine in it."""

from samovar.engine.process import main
from tests.engine.fakes import build_fake

if __name__ == "__main__":
    main(build_fake)
