//! Byte-level BPE: text is split by rule, each piece begins as bytes, and neighbours merge by rank.

use hashbrown::HashMap;

use super::TokenizerError;
use super::alphabet;
use super::merge::{Merger, NO_TOKEN};
use super::split::Splitter;
use super::table::TokenTable;
use super::vocabulary::{TokenKind, Vocabulary, keys};

/// The merge of two tokens.
#[derive(Debug, Clone, Copy)]
struct Merge {
    /// Position in the file's list; lower ranks go first.
    rank: u32,
    /// The token that results.
    id: u32,
}

/// A compiled byte-level BPE model.
#[derive(Debug, Clone)]
pub(super) struct Bpe {
    splitter: Splitter,
    /// The token of each byte, or [`NO_TOKEN`].
    bytes: [u32; 256],
    merges: HashMap<(u32, u32), Merge>,
}

impl Bpe {
    /// Compiles the merges of `vocabulary`, whose tokens are in `table`.
    pub fn new(
        vocabulary: &Vocabulary<'_>,
        table: &TokenTable,
        splitter: Splitter,
    ) -> Result<Self, TokenizerError> {
        if vocabulary.merges.is_empty() {
            return Err(TokenizerError::MissingKey { key: keys::MERGES });
        }
        let mut merges = HashMap::with_capacity(vocabulary.merges.len());
        let mut whole = String::new();
        for (index, merge) in vocabulary.merges.iter().enumerate() {
            let bad = |reason| TokenizerError::BadMerge { index, merge: (*merge).to_owned(), reason };
            let rank = u32::try_from(index).map_err(|_| bad("has a rank beyond 32 bits"))?;
            // The parts are never empty, so a space at the very start belongs to the left one.
            let (left, right) = merge
                .char_indices()
                .skip(1)
                .find(|&(_, c)| c == ' ')
                .map(|(at, _)| (&merge[..at], &merge[at + 1..]))
                .ok_or_else(|| bad("is not two parts with a space between"))?;
            whole.clear();
            whole.extend([left, right]);
            let token = |part: &str, reason| table.find(part.as_bytes()).ok_or_else(|| bad(reason));
            let pair = (
                token(left, "has a left part that is no token")?,
                token(right, "has a right part that is no token")?,
            );
            let id = token(&whole, "makes a text that is no token")?;
            merges.entry(pair).or_insert(Merge { rank, id }); // a repeated rule has the rank of its first mention
        }
        let bytes =
            alphabet::CHARS.map(|c| table.find(c.encode_utf8(&mut [0; 4]).as_bytes()).unwrap_or(NO_TOKEN));
        Ok(Self { splitter, bytes, merges })
    }

    /// Bytes of `text` that have a token, alone or with others.
    pub fn least_bytes(&self, text: &str) -> usize {
        text.bytes().filter(|&byte| self.bytes[usize::from(byte)] != NO_TOKEN).count()
    }

    /// What a token of this kind of vocabulary adds to the text.
    pub fn append_text(spelling: &str, kind: TokenKind, out: &mut Vec<u8>) {
        match kind {
            TokenKind::Normal => alphabet::unspell_into(spelling, out),
            TokenKind::Byte | TokenKind::Control | TokenKind::Unknown | TokenKind::UserDefined => {
                out.extend_from_slice(spelling.as_bytes());
            }
            TokenKind::Unused => {}
        }
    }

    /// Appends the tokens of a text without special tokens. Bytes for which there is no token are left out.
    pub fn encode(&self, text: &str, table: &TokenTable, out: &mut Vec<u32>) {
        let mut merger = Merger::default();
        let mut spelling = String::new();
        self.splitter.split(text, &mut |piece| {
            if self.splitter.whole_pieces_first() {
                alphabet::spell(piece.as_bytes(), &mut spelling);
                if let Some(id) = table.find(spelling.as_bytes()) {
                    out.push(id);
                    return;
                }
            }
            self.encode_piece(piece.as_bytes(), &mut merger, out);
        });
    }

    fn encode_piece(&self, piece: &[u8], merger: &mut Merger, out: &mut Vec<u32>) {
        merger.clear();
        for &byte in piece {
            merger.push(1, self.bytes[usize::from(byte)]);
        }
        merger.run(|left, right| self.merges.get(&(left.id, right.id)).map(|merge| (merge.rank, merge.id)));
        out.extend(merger.symbols().map(|symbol| symbol.id).filter(|&id| id != NO_TOKEN));
    }
}
