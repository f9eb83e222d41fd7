//! Sizes as people write them: `8GiB`, `512MiB`, `12GB`, plain bytes.

/// Units, longest first so that `GiB` is not read as `B`.
const UNITS: [(&str, u64); 9] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("KB", 1_000),
    ("B", 1),
];

/// Reads one size; a number without a unit is in bytes, and only a unit allows a fraction (`7.5GiB`).
pub(crate) fn read(text: &str) -> Option<u64> {
    let text = text.trim();
    if let Ok(bytes) = text.parse() {
        return Some(bytes);
    }
    let unit = |&(unit, scale): &(&str, u64)| {
        let cut = text.len().checked_sub(unit.len()).filter(|&cut| text.is_char_boundary(cut))?;
        text[cut..].eq_ignore_ascii_case(unit).then_some((&text[..cut], scale))
    };
    let (number, scale) = UNITS.iter().find_map(unit)?;
    times(number.trim(), scale)
}

/// A decimal number times `scale`, rounded down, in whole arithmetic.
fn times(number: &str, scale: u64) -> Option<u64> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = |text: &str| text.chars().all(|c| c.is_ascii_digit());
    if whole.is_empty() || fraction.len() > 9 || !digits(whole) || !digits(fraction) {
        return None;
    }
    let part = format!("{fraction:0<9}").parse::<u128>().ok()?;
    let bytes =
        u128::from(whole.parse::<u64>().ok()?) * u128::from(scale) + part * u128::from(scale) / 1_000_000_000;
    u64::try_from(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::read;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        let table = [
            ("1024", Some(1024)),
            ("8GiB", Some(8 << 30)),
            (" 8 gib ", Some(8 << 30)),
            ("7.5GiB", Some(15 << 29)),
            ("12GB", Some(12_000_000_000)),
            ("0.5KB", Some(500)),
            ("3B", Some(3)),
            ("", None),
            ("GiB", None),
            ("-1GiB", None),
            ("1.5", None),
            ("1.GiB", Some(1 << 30)),
            ("1e3MB", None),
            ("8GiBs", None),
            ("8 Gü", None),
            ("99999999999TiB", None),
        ];
        for (text, bytes) in table {
            assert_eq!(read(text), bytes, "{text:?}");
        }
    }
}
