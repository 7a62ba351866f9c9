"""``python -P -m hpc_toolkit`` is ``hpctk``; without -P, some files here can replace Python's."""

from hpc_toolkit.system.installation import leave_directory, listed_imports

leave_directory()

with listed_imports():
    from hpc_toolkit.cli import main

if __name__ == "__main__":
    main()
