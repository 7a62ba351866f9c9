"""The rules by which policies choose arms, one module for each family."""
