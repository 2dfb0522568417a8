"""The kinds of verdict, a package each, and the register that names them."""
