def render(v,p): pass
def suffixes(): return ('.html',)
