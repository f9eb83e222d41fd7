//! The rules that cut text into pieces before BPE, by the name a file gives (`tokenizer.ggml.pre`).
//!
//! A rule is a sequence of passes; each cuts the pieces of the one before. The expressions are those the models were
//! published with, except for the look-ahead `\s+(?!\S)` that nearly all of them end in: a run of white space leaves its
//! last character to the word behind it. That is done in code (see [`Pass::pieces`]), so that an automaton without
//! backtracking can run everything else: time is linear in the text whatever the text is.

use regex_automata::Input;
use regex_automata::meta::Regex;

use super::TokenizerError;

/// One pass: an expression, and whether white space that it leaves is cut the common way.
#[derive(Debug)]
struct PassRule {
    expression: &'static str,
    spaces: bool,
}

/// A rule and its names.
#[derive(Debug)]
struct Rule {
    names: &'static [&'static str],
    passes: &'static [PassRule],
    /// A piece that is a token as a whole is not merged from its bytes.
    whole_pieces_first: bool,
    /// Whether text begins with BOS when the file does not say.
    add_bos: bool,
}

/// A pass that cuts leftover white space the common way.
const fn words(expression: &'static str) -> PassRule {
    PassRule { expression, spaces: true }
}

/// A pass that only isolates what it matches.
const fn isolate(expression: &'static str) -> PassRule {
    PassRule { expression, spaces: false }
}

const GPT2: PassRule = words(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+");
const DIGIT: PassRule = isolate(r"\p{N}");
const LLAMA3: PassRule = words(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+",
);
const QWEN2: PassRule = words(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+",
);
const QWEN35: PassRule = words(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+",
);
const TEKKEN: PassRule = words(concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+",
));
const GPT4O: PassRule = words(concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+",
));
const DEEPSEEK3_WORDS: PassRule = words(concat!(
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+",
));
/// The letters that have two cases (Latin, Greek, Cyrillic, Armenian, Georgian, Cherokee, ...), as DeepSeek lists them.
const DEEPSEEK_LETTERS: PassRule = isolate(concat!(
    r"\s?[",
    r"A-Za-z\u{B5}\u{C0}-\u{D6}\u{D8}-\u{F6}\u{F8}-\u{1BA}\u{1BC}-\u{1BF}\u{1C4}-\u{293}",
    r"\u{295}-\u{2AF}\u{370}-\u{373}\u{376}\u{377}\u{37B}-\u{37D}\u{37F}\u{386}\u{388}-\u{38A}\u{38C}",
    r"\u{38E}-\u{3A1}\u{3A3}-\u{3F5}\u{3F7}-\u{481}\u{48A}-\u{52F}\u{531}-\u{556}\u{10A0}-\u{10C5}",
    r"\u{13A0}-\u{13F5}\u{13F8}-\u{13FD}\u{1C90}-\u{1CBA}\u{1CBD}-\u{1CBF}\u{1D00}-\u{1D2B}",
    r"\u{1D6B}-\u{1D77}\u{1D79}-\u{1D9A}\u{1E00}-\u{1F15}\u{1F18}-\u{1F1D}\u{1F20}-\u{1F45}",
    r"\u{1F48}-\u{1F4D}\u{1F50}-\u{1F57}\u{1F59}\u{1F5B}\u{1F5D}\u{1F5F}-\u{1F7D}\u{1F80}-\u{1FB4}",
    r"\u{1FB6}-\u{1FBC}\u{1FBE}\u{1FC2}-\u{1FC4}\u{1FC6}-\u{1FCC}\u{1FD0}-\u{1FD3}\u{1FD6}-\u{1FDB}",
    r"\u{1FE0}-\u{1FEC}\u{1FF2}-\u{1FF4}\u{1FF6}-\u{1FFC}\u{2102}\u{2107}\u{210A}-\u{2113}\u{2115}",
    r"\u{2119}-\u{211D}\u{2124}\u{2126}\u{2128}\u{212A}-\u{212D}\u{212F}-\u{2134}\u{2139}",
    r"\u{213C}-\u{213F}\u{2145}-\u{2149}\u{214E}\u{2183}\u{2184}\u{2C00}-\u{2C7B}\u{2C7E}-\u{2CE4}",
    r"\u{2CEB}-\u{2CEE}\u{2CF2}\u{2CF3}\u{A640}-\u{A66D}\u{A680}-\u{A69B}\u{A722}-\u{A76F}",
    r"\u{A771}-\u{A787}\u{A78B}-\u{A78E}\u{AB70}-\u{ABBF}\u{FB00}-\u{FB06}\u{FB13}-\u{FB17}",
    r"\u{FF21}-\u{FF3A}\u{FF41}-\u{FF5A}\u{10400}-\u{1044F}\u{104B0}-\u{104D3}\u{104D8}-\u{104FB}",
    r"\u{10C80}-\u{10CB2}\u{10CC0}-\u{10CF2}\u{118A0}-\u{118DF}\u{1E900}-\u{1E943}",
    r"]+",
));
const CJK: PassRule = isolate(r"[\u{4E00}-\u{9FA5}\u{0800}-\u{4E00}\u{AC00}-\u{D7FF}]+");
const LINE_BREAK: PassRule = isolate(r"[\r\n]");

/// Every rule we know.
const RULES: &[Rule] = &[
    Rule {
        names: &["gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4"],
        passes: &[GPT2],
        whole_pieces_first: false,
        add_bos: false,
    },
    Rule {
        names: &["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"],
        passes: &[DIGIT, GPT2],
        whole_pieces_first: false,
        add_bos: false,
    },
    Rule {
        names: &["llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"],
        passes: &[LLAMA3],
        whole_pieces_first: true,
        add_bos: true,
    },
    Rule {
        names: &["dbrx", "smaug-bpe", "chatglm-bpe", "glm4"],
        passes: &[LLAMA3],
        whole_pieces_first: false,
        add_bos: false,
    },
    Rule {
        names: &["qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"],
        passes: &[QWEN2],
        whole_pieces_first: false,
        add_bos: false,
    },
    Rule { names: &["qwen35"], passes: &[QWEN35], whole_pieces_first: false, add_bos: false },
    Rule { names: &["tekken"], passes: &[TEKKEN], whole_pieces_first: true, add_bos: true },
    Rule { names: &["gpt-4o"], passes: &[GPT4O], whole_pieces_first: false, add_bos: false },
    Rule {
        names: &["falcon"],
        passes: &[isolate(r"[\p{P}$+<=>^~|`]+"), GPT2, isolate(r"[0-9][0-9][0-9]")],
        whole_pieces_first: false,
        add_bos: false,
    },
    Rule {
        names: &["deepseek-llm"],
        passes: &[
            LINE_BREAK,
            DEEPSEEK_LETTERS,
            isolate(r"\s?[!-/:-~\u{FF01}-\u{FF0F}\u{FF1A}-\u{FF5E}\u{2018}-\u{201F}\u{3000}-\u{3002}]+"),
            isolate(r"\s+$"),
            CJK,
            isolate(r"\p{N}+"),
        ],
        whole_pieces_first: false,
        add_bos: false,
    },
    Rule {
        names: &["deepseek-coder"],
        passes: &[LINE_BREAK, isolate(r"\s?\p{L}+"), isolate(r"\s?\p{P}+"), CJK, DIGIT],
        whole_pieces_first: false,
        add_bos: false,
    },
    Rule {
        names: &["deepseek-v3"],
        passes: &[
            isolate(r"\p{N}{1,3}"),
            isolate(r"[\u{4E00}-\u{9FA5}\u{3040}-\u{309F}\u{30A0}-\u{30FF}]+"),
            DEEPSEEK3_WORDS,
        ],
        whole_pieces_first: false,
        add_bos: false,
    },
];

/// All names, sorted, for messages.
pub(super) fn known_names() -> String {
    let mut names: Vec<&str> = RULES.iter().flat_map(|rule| rule.names).copied().collect();
    names.sort_unstable();
    names.join(", ")
}

/// A compiled pass.
#[derive(Debug, Clone)]
struct Pass {
    regex: Regex,
}

/// Position of the white-space pattern in a compiled pass.
const SPACES: usize = 1;

impl Pass {
    fn new(rule: &PassRule) -> Result<Self, TokenizerError> {
        let patterns = [rule.expression, r"\s+"];
        let regex = Regex::new_many(if rule.spaces { &patterns[..] } else { &patterns[..SPACES] });
        Ok(Self { regex: regex.map_err(Box::new)? })
    }

    /// Cuts `text` completely: matches and what lies between them.
    fn pieces(&self, text: &str, mut each: impl FnMut(&str)) {
        let mut at = 0;
        while let Some(found) = self.regex.find(Input::new(text).range(at..)) {
            if found.start() > at {
                each(&text[at..found.start()]);
            }
            let mut end = found.end();
            if found.pattern().as_usize() == SPACES && end < text.len() {
                // The run is followed by something else, which takes the run's last character unless it is the only one.
                let last = text[found.range()].chars().next_back().map_or(0, char::len_utf8);
                if end - last > found.start() {
                    end -= last;
                }
            }
            each(&text[found.start()..end]);
            at = end;
        }
        if at < text.len() {
            each(&text[at..]);
        }
    }
}

/// A compiled rule.
#[derive(Debug, Clone)]
pub(super) struct Splitter {
    passes: Vec<Pass>,
    whole_pieces_first: bool,
    add_bos: bool,
}

impl Splitter {
    /// The rule called `pre`.
    pub fn new(pre: &str) -> Result<Self, TokenizerError> {
        let rule = RULES.iter().find(|rule| rule.names.contains(&pre));
        let rule =
            rule.ok_or_else(|| TokenizerError::UnknownPre { pre: pre.to_owned(), known: known_names() })?;
        Ok(Self {
            passes: rule.passes.iter().map(Pass::new).collect::<Result<_, _>>()?,
            whole_pieces_first: rule.whole_pieces_first,
            add_bos: rule.add_bos,
        })
    }

    /// Whether a piece that is a token as a whole is that token, whatever the merges say.
    pub fn whole_pieces_first(&self) -> bool {
        self.whole_pieces_first
    }

    /// Whether text begins with BOS when the file does not say.
    pub fn adds_bos(&self) -> bool {
        self.add_bos
    }

    /// Calls `each` with the pieces of `text` in order; together they are `text`.
    pub fn split(&self, text: &str, each: &mut dyn FnMut(&str)) {
        split_from(&self.passes, text, each);
    }
}

fn split_from(passes: &[Pass], text: &str, each: &mut dyn FnMut(&str)) {
    match passes.split_first() {
        None => each(text),
        Some((pass, rest)) => pass.pieces(text, |piece| split_from(rest, piece, each)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::LazyLock;

    fn pieces(pre: &str, text: &str) -> Vec<String> {
        let mut out = Vec::new();
        Splitter::new(pre).unwrap().split(text, &mut |piece| out.push(piece.to_owned()));
        out
    }

    /// Every rule compiles and every name leads to exactly one.
    #[test]
    fn names_are_unique_and_compile() {
        let mut seen = std::collections::HashSet::new();
        for name in RULES.iter().flat_map(|rule| rule.names) {
            assert!(seen.insert(*name), "{name} twice");
            Splitter::new(name).unwrap();
        }
    }

    /// An unknown name is refused, and the refusal says what is known.
    #[test]
    fn unknown_names_are_refused() {
        let error = Splitter::new("llama-9").unwrap_err();
        assert_eq!(error.code(), "tokenizer_unknown_pre");
        assert!(error.to_string().contains("llama-9") && error.to_string().contains("qwen35"), "{error}");
    }

    /// What the look-ahead of the published expressions does: a run of spaces leaves its last one to the word, a run at the
    /// end stays whole, a single space before a line break belongs to it.
    #[test]
    fn white_space_runs() {
        assert_eq!(pieces("gpt-2", "a   b  "), ["a", "  ", " b", "  "]);
        assert_eq!(pieces("gpt-2", "a\n\nb"), ["a", "\n", "\n", "b"]);
        assert_eq!(pieces("llama-bpe", "a  \n\n  b"), ["a", "  \n\n", " ", " b"]);
        assert_eq!(pieces("qwen2", "\u{3000}\u{3000}x"), ["\u{3000}", "\u{3000}x"]);
        assert_eq!(pieces("smollm", "  12"), ["  ", "1", "2"]);
    }

    /// One line per family: what sets it apart from the others.
    #[test]
    fn families_differ_where_they_should() {
        assert_eq!(pieces("llama-bpe", "I'LL 12345"), ["I", "'LL", " ", "123", "45"]);
        assert_eq!(pieces("qwen2", "I'll 123"), ["I", "'ll", " ", "1", "2", "3"]);
        assert_eq!(pieces("qwen2", "e\u{301}a"), ["e", "\u{301}a"]);
        assert_eq!(pieces("qwen35", "e\u{301}a"), ["e\u{301}a"]);
        assert_eq!(
            pieces("tekken", "HelloWORLDagain don't 42/\n"),
            ["Hello", "WORLDagain", " don", "'t", " ", "4", "2", "/\n"]
        );
        assert_eq!(pieces("gpt-4o", "HelloWorld don't 1234"), ["Hello", "World", " don't", " ", "123", "4"]);
        assert_eq!(pieces("falcon", "ab!!12345"), ["ab", "!!", "123", "45"]);
        assert_eq!(pieces("deepseek-v3", "x=1234 日本語です"), ["x", "=", "123", "4", " ", "日本語です"]);
    }

    proptest! {
        /// No rule loses, repeats or reorders anything.
        #[test]
        fn pieces_make_up_the_text(text in "[a-zA-Z0-9 \\t\\r\\n'./é\u{301}日本\u{3000}🦀-]{0,60}|\\PC{0,40}") {
            static SPLITTERS: LazyLock<Vec<Splitter>> =
                LazyLock::new(|| RULES.iter().map(|rule| Splitter::new(rule.names[0]).unwrap()).collect());
            for splitter in &*SPLITTERS {
                let mut together = String::new();
                splitter.split(&text, &mut |piece| {
                    assert!(!piece.is_empty());
                    together.push_str(piece);
                });
                prop_assert_eq!(&together, &text);
            }
        }
    }
}
