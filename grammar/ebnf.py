from pdkv.grammar.formats import Format
def ebnf(text: str) -> Format:
    raise NotImplementedError
