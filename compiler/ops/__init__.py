"""The ops that ship with the compiler, on three floors: primitives, the language, families."""
