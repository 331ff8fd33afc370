"""Ops stated by hand that stand below the language of programs; bodies of loops."""
