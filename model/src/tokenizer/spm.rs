//! SentencePiece (`llama`): spaces become `▁`, characters merge by score, what is left over is spelled in bytes.

use super::TokenizerError;
use super::merge::{Merger, NO_TOKEN};
use super::table::TokenTable;
use super::vocabulary::{TokenKind, Vocabulary, keys};

/// How SentencePiece spells a space.
const SPACE: char = '▁';

/// A compiled SentencePiece model.
#[derive(Debug, Clone)]
pub(super) struct Spm {
    /// Merge rank of each token: the order of the scores, highest first. [`u32::MAX`] for tokens that text never becomes.
    ranks: Vec<u32>,
    /// The token of each byte, or [`NO_TOKEN`].
    bytes: [u32; 256],
    /// Stands for a byte without a token.
    unk: u32,
    add_space_prefix: bool,
}

impl Spm {
    /// Compiles the scores of `vocabulary`, whose tokens are in `table`.
    pub fn new(vocabulary: &Vocabulary<'_>, table: &TokenTable) -> Result<Self, TokenizerError> {
        let (found, expected) = (vocabulary.scores.len(), vocabulary.tokens.len());
        if found == 0 {
            return Err(TokenizerError::MissingKey { key: keys::SCORES });
        }
        if found != expected {
            return Err(TokenizerError::WrongLength { key: keys::SCORES, found, expected });
        }
        let mut ranks = Vec::with_capacity(expected);
        for (id, (&score, kind)) in vocabulary.scores.iter().zip(&vocabulary.kinds).enumerate() {
            if !score.is_finite() {
                return Err(TokenizerError::BadScore { id });
            }
            ranks.push(match kind {
                TokenKind::Normal | TokenKind::UserDefined => rank(score),
                _ => NEVER,
            });
        }
        let byte_token = |byte: usize| table.find(format!("<0x{byte:02X}>").as_bytes()).unwrap_or(NO_TOKEN);
        Ok(Self {
            ranks,
            bytes: std::array::from_fn(byte_token),
            unk: vocabulary.unk.unwrap_or(NO_TOKEN),
            add_space_prefix: vocabulary.add_space_prefix.unwrap_or(true),
        })
    }

    /// What a token of this kind of vocabulary adds to the text.
    pub fn append_text(spelling: &str, kind: TokenKind, out: &mut Vec<u8>) {
        match kind {
            TokenKind::Normal => {
                let mut utf8 = [0; 4];
                for c in spelling.chars() {
                    let c = if c == SPACE { ' ' } else { c };
                    out.extend_from_slice(c.encode_utf8(&mut utf8).as_bytes());
                }
            }
            TokenKind::Byte => match parse_byte(spelling) {
                Some(byte) => out.push(byte),
                None => out.extend_from_slice(spelling.as_bytes()),
            },
            TokenKind::Control | TokenKind::Unknown | TokenKind::UserDefined => {
                out.extend_from_slice(spelling.as_bytes());
            }
            TokenKind::Unused => {}
        }
    }

    /// A number of bytes of `text` that become part of tokens at least: all where there is an unknown token.
    pub fn least_bytes(&self, text: &str) -> usize {
        if self.unk == NO_TOKEN { 0 } else { text.len() }
    }

    /// Whether encoding puts a space in front of the text.
    pub fn adds_space_prefix(&self) -> bool {
        self.add_space_prefix
    }

    /// Appends the tokens of a text without special tokens. `first`: it begins the whole text or follows a special token.
    pub fn encode(&self, text: &str, first: bool, table: &TokenTable, out: &mut Vec<u32>) {
        let mut spelled = String::with_capacity(text.len() + SPACE.len_utf8());
        if first && self.add_space_prefix {
            spelled.push(SPACE);
        }
        spelled.extend(text.chars().map(|c| if c == ' ' { SPACE } else { c }));
        let token = |part: &str| {
            let id = table.find(part.as_bytes())?;
            let rank = *self.ranks.get(id as usize)?;
            (rank != NEVER).then_some((rank, id))
        };
        let mut merger = Merger::default();
        let mut utf8 = [0; 4];
        for c in spelled.chars() {
            merger.push(c.len_utf8(), token(c.encode_utf8(&mut utf8)).map_or(NO_TOKEN, |(_, id)| id));
        }
        merger.run(|left, right| token(&spelled[left.start..right.start + right.len]));
        for symbol in merger.symbols() {
            if symbol.id != NO_TOKEN {
                out.push(symbol.id);
                continue;
            }
            let bytes = spelled[symbol.start..symbol.start + symbol.len].bytes();
            let ids = bytes.map(|byte| match self.bytes[usize::from(byte)] {
                NO_TOKEN => self.unk,
                id => id,
            });
            out.extend(ids.filter(|&id| id != NO_TOKEN));
        }
    }
}

/// Rank of a token that text never becomes.
const NEVER: u32 = u32::MAX;

/// Turns a score into a rank: the higher the score, the lower the rank. Finite floats never give [`NEVER`].
fn rank(score: f32) -> u32 {
    let bits = score.to_bits();
    let ascending = if score.is_sign_negative() { !bits } else { bits | 1 << 31 };
    !ascending
}

/// The byte a spelling like `<0x0A>` stands for.
fn parse_byte(spelling: &str) -> Option<u8> {
    let digits = spelling.strip_prefix("<0x")?.strip_suffix('>')?;
    let only_hex = digits.len() == 2 && digits.bytes().all(|b| b.is_ascii_hexdigit()); // from_str_radix takes a sign too
    only_hex.then(|| u8::from_str_radix(digits, 16).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Higher scores must merge first, across the sign change as well.
    #[test]
    fn ranks_reverse_the_order_of_scores() {
        let scores = [f32::MAX, 1e9, 1.5, 0.0, -0.0, -1e-20, -1.0, -31_999.0, f32::MIN];
        let ranks: Vec<u32> = scores.iter().map(|&s| rank(s)).collect();
        assert!(ranks.is_sorted(), "{ranks:?}");
        assert!(ranks.iter().all(|&r| r != NEVER));
    }

    /// Only the exact spelling is a byte.
    #[test]
    fn byte_spellings() {
        assert_eq!(parse_byte("<0x0A>"), Some(10));
        assert_eq!(parse_byte("<0xFF>"), Some(255));
        for other in ["<0xA>", "<0x+A>", "<0x0A", "0x0A>", "<0xGG>", "<0x00A>", "▁"] {
            assert_eq!(parse_byte(other), None, "{other}");
        }
    }
}
