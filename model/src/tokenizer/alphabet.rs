//! The byte alphabet of GPT-2: how byte-level vocabularies spell arbitrary bytes as printable characters.
//!
//! Every byte has one character. Bytes that print well in Latin-1 (`!`..`~`, `¡`..`¬`, `®`..`ÿ`) stand for themselves; the
//! other 68 are numbered in order from U+0100. So a space is spelled `Ġ` and a newline `Ċ`.

/// First character given to a byte that does not stand for itself.
const FIRST_SUBSTITUTE: u32 = 0x100;

/// Whether `byte` is spelled as the Latin-1 character of the same number.
const fn stands_for_itself(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF)
}

/// `CHARS[b]` spells byte `b`.
pub(super) static CHARS: [char; 256] = {
    let mut table = ['\0'; 256];
    let mut substitute = FIRST_SUBSTITUTE;
    let mut byte = 0u8;
    loop {
        table[byte as usize] = if stands_for_itself(byte) {
            byte as char
        } else {
            let Some(c) = char::from_u32(substitute) else { unreachable!() };
            substitute += 1;
            c
        };
        if byte == u8::MAX {
            break table;
        }
        byte += 1;
    }
};

/// `BYTES[c]` is the byte that the character numbered `c` spells, for the characters below U+0144.
static BYTES: [Option<u8>; 0x144] = {
    let mut table = [None; 0x144];
    let mut byte = 0u8;
    loop {
        table[CHARS[byte as usize] as usize] = Some(byte);
        if byte == u8::MAX {
            break table;
        }
        byte += 1;
    }
};

/// Appends the bytes that `spelling` stands for; its own bytes if it holds a character outside the alphabet.
pub(super) fn unspell_into(spelling: &str, out: &mut Vec<u8>) {
    let start = out.len();
    for c in spelling.chars() {
        match BYTES.get(c as usize) {
            Some(&Some(byte)) => out.push(byte),
            _ => {
                out.truncate(start);
                out.extend_from_slice(spelling.as_bytes());
                return;
            }
        }
    }
}

/// Replaces `out` with the spelling of `bytes`.
pub(super) fn spell(bytes: &[u8], out: &mut String) {
    out.clear();
    out.extend(bytes.iter().map(|&b| CHARS[usize::from(b)]));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Spot checks from published GPT-2 vocabularies: space, newline, tab, NUL, DEL, soft hyphen, no-break space.
    #[test]
    fn known_spellings() {
        let known = [
            (b' ', 'Ġ'),
            (b'\n', 'Ċ'),
            (b'\t', 'ĉ'),
            (0, 'Ā'),
            (0x7F, 'ġ'),
            (0xAD, 'Ń'),
            (0xA0, 'ł'),
            (b'A', 'A'),
        ];
        for (byte, c) in known {
            assert_eq!(CHARS[usize::from(byte)], c, "byte {byte:#04x}");
        }
    }

    /// Every byte survives being spelled and read back, so decoding loses nothing.
    #[test]
    fn spelling_is_a_bijection() {
        let all: Vec<u8> = (0..=u8::MAX).collect();
        let (mut spelled, mut back) = (String::new(), Vec::new());
        spell(&all, &mut spelled);
        unspell_into(&spelled, &mut back);
        assert_eq!(back, all);
    }

    /// A token spelled with a character outside the alphabet stands for its own text.
    #[test]
    fn foreign_characters_stand_for_themselves() {
        let mut out = b"x".to_vec();
        unspell_into("Ġ語", &mut out);
        assert_eq!(out, [b"x".as_slice(), "Ġ語".as_bytes()].concat());
    }
}
