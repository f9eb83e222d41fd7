//! Tokens that are recognised whole in text, and tokens that end an answer.

use aho_corasick::{AhoCorasick, MatchKind};

use super::TokenizerError;
use super::table::TokenTable;
use super::vocabulary::{TokenKind, Vocabulary};

/// Most bytes of special-token spellings accepted; real vocabularies have below 100 KB.
const MAX_SPECIAL_BYTES: usize = 1 << 20;

/// Spellings that end an answer when the vocabulary marks them as control tokens. A plain token of the same spelling is
/// text: Qwen's vocabulary has an ordinary `</s>`.
const END_SPELLINGS: &[&str] = &[
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|eot|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
    "</s>",
    "[EOS]",
];

/// A run of text between special tokens, or a special token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fragment<'t> {
    Text(&'t str),
    Token(u32),
}

/// Finds one set of spellings; where several match, the leftmost, then the longest counts.
#[derive(Debug, Clone)]
struct Finder {
    automaton: AhoCorasick,
    /// Token of each pattern.
    ids: Vec<u32>,
}

impl Finder {
    /// A finder for the tokens whose kind is `wanted`; `None` when there are none.
    fn new(
        vocabulary: &Vocabulary<'_>,
        wanted: impl Fn(TokenKind) -> bool,
    ) -> Result<Option<Self>, TokenizerError> {
        let is_wanted = |&(id, spelling): &(u32, &&str)| {
            !spelling.is_empty() && vocabulary.kinds.get(id as usize).is_some_and(|&kind| wanted(kind))
        };
        let (ids, spellings): (Vec<u32>, Vec<&str>) =
            (0..).zip(&vocabulary.tokens).filter(is_wanted).map(|(id, spelling)| (id, *spelling)).unzip();
        let too_large = |found| {
            let what = "bytes of special-token spellings";
            TokenizerError::TooLarge { what, found, limit: MAX_SPECIAL_BYTES }
        };
        let total = spellings.iter().map(|s| s.len()).sum();
        if total > MAX_SPECIAL_BYTES {
            return Err(too_large(total));
        }
        if ids.is_empty() {
            return Ok(None);
        }
        // Building fails only when the automaton's state numbers run out.
        let builder = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(spellings);
        let automaton = builder.map_err(|_| too_large(total))?;
        Ok(Some(Self { automaton, ids }))
    }
}

/// What a vocabulary's special tokens mean for text.
#[derive(Debug, Clone)]
pub(super) struct Specials {
    /// Recognised when the text may contain control tokens.
    all: Option<Finder>,
    /// Recognised in any text.
    user_defined: Option<Finder>,
    /// Sorted ids that end an answer.
    ends: Vec<u32>,
}

impl Specials {
    pub fn new(vocabulary: &Vocabulary<'_>, table: &TokenTable) -> Result<Self, TokenizerError> {
        use TokenKind::{Control, Unknown, UserDefined};
        let named = [vocabulary.eos, vocabulary.eot, vocabulary.eom].into_iter().flatten();
        let spelled = END_SPELLINGS
            .iter()
            .filter_map(|spelling| table.find(spelling.as_bytes()))
            .filter(|&id| table.kind(id) == Some(Control));
        let mut ends: Vec<u32> = named.chain(spelled).collect();
        ends.sort_unstable();
        ends.dedup();
        Ok(Self {
            all: Finder::new(vocabulary, |kind| matches!(kind, Control | Unknown | UserDefined))?,
            user_defined: Finder::new(vocabulary, |kind| kind == UserDefined)?,
            ends,
        })
    }

    /// Sorted ids that end an answer.
    pub fn ends(&self) -> &[u32] {
        &self.ends
    }

    /// Cuts `text` at special tokens. With `parse` false only user-defined tokens are recognised.
    pub fn fragments<'t>(&self, text: &'t str, parse: bool, each: &mut impl FnMut(Fragment<'t>)) {
        let mut rest = 0;
        if let Some(finder) = if parse { &self.all } else { &self.user_defined } {
            for found in finder.automaton.find_iter(text) {
                if found.start() > rest {
                    each(Fragment::Text(&text[rest..found.start()]));
                }
                each(Fragment::Token(finder.ids[found.pattern().as_usize()]));
                rest = found.end();
            }
        }
        if rest < text.len() {
            each(Fragment::Text(&text[rest..]));
        }
    }
}
