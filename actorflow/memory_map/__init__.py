"""The memory of a plan as a picture: which bytes, from when to when, for whom.

`layout` turns a plan into boxes of offset x launches; `html` puts them on a page of its own, which
`page.html` frames and `page.js` draws, and `png` in a picture.
"""
