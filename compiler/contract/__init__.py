"""All that actors know of the compiler.

Plan, types, placement, SBP words, programs and regions, errors, codec.
"""
