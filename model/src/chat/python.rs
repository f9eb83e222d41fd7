//! Values spelled the way Python spells them: templates were written for it and models were trained on its output.

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, State};
use std::fmt::{self, Write};

/// What `str.strip()` removes. Unlike Rust's white space it has the four information separators.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1C}'..='\u{1F}').contains(&c)
}

/// `repr(float)`: the shortest digits that read back the same, with an exponent from 1e16 on and below 1e-4.
pub(super) fn write_float(out: &mut impl Write, value: f64) -> fmt::Result {
    if value.is_nan() {
        return out.write_str("nan");
    }
    if value.is_infinite() {
        return out.write_str(if value > 0.0 { "inf" } else { "-inf" });
    }
    let magnitude = value.abs();
    if magnitude == 0.0 || (1e-4..1e16).contains(&magnitude) {
        // Debug writes the shortest digits and always a decimal point in this range.
        return if magnitude.fract() == 0.0 { write!(out, "{value:.1}") } else { write!(out, "{value}") };
    }
    let scientific = format!("{value:e}");
    match scientific.split_once('e') {
        Some((digits, exponent)) => {
            let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |e| ('-', e));
            write!(out, "{digits}e{sign}{exponent:0>2}")
        }
        None => out.write_str(&scientific),
    }
}

/// `repr(str)`: single quotes unless the text has some and no double ones.
fn write_quoted(out: &mut impl Write, text: &str) -> fmt::Result {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.write_char(quote)?;
    for c in text.chars() {
        match c {
            '\n' => out.write_str("\\n")?,
            '\r' => out.write_str("\\r")?,
            '\t' => out.write_str("\\t")?,
            '\\' => out.write_str("\\\\")?,
            c if c == quote => write!(out, "\\{c}")?,
            c if (c as u32) < 0x20 || (0x7F..0xA1).contains(&(c as u32)) || c == '\u{AD}' => {
                write!(out, "\\x{:02x}", c as u32)?;
            }
            c if c != ' ' && is_space(c) => write!(out, "\\u{:04x}", c as u32)?,
            c => out.write_char(c)?,
        }
    }
    out.write_char(quote)
}

/// `repr(value)`.
fn write_repr(out: &mut impl Write, state: &State<'_, '_>, value: &Value) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => Ok(write_quoted(out, text)?),
        None => write_str(out, state, value),
    }
}

/// `str(value)`. Containers are walked here so that what they hold is spelled the same way; every item is charged, because a
/// short template can make a list that is too long to walk.
pub(super) fn write_str(out: &mut impl Write, state: &State<'_, '_>, value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::Number if !value.is_integer() => match f64::try_from(value.clone()) {
            Ok(float) => write_float(out, float)?,
            Err(_) => write!(out, "{value}")?,
        },
        ValueKind::Seq | ValueKind::Iterable => {
            out.write_char('[')?;
            for (index, item) in value.try_iter()?.enumerate() {
                state.consume_fuel(1)?;
                out.write_str(if index > 0 { ", " } else { "" })?;
                write_repr(out, state, &item)?;
            }
            out.write_char(']')?;
        }
        ValueKind::Map => {
            out.write_char('{')?;
            for (index, key) in value.try_iter()?.enumerate() {
                state.consume_fuel(1)?;
                out.write_str(if index > 0 { ", " } else { "" })?;
                write_repr(out, state, &key)?;
                out.write_str(": ")?;
                write_repr(out, state, &value.get_item(&key)?)?;
            }
            out.write_char('}')?;
        }
        _ => write!(out, "{value}")?,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn float(value: f64) -> String {
        let mut out = String::new();
        write_float(&mut out, value).unwrap();
        out
    }

    /// As `repr` prints in CPython 3.11.
    #[test]
    fn floats() {
        let known = [
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (27.5, "27.5"),
            (0.1, "0.1"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1e-7, "1e-07"),
            (1.5e-7, "1.5e-07"),
            (123_456_789_012_345.0, "123456789012345.0"),
            (9_999_999_999_999_998.0, "9999999999999998.0"),
            (1e16, "1e+16"),
            (1e22, "1e+22"),
            (-1.25e100, "-1.25e+100"),
            (5e-324, "5e-324"),
            (f64::INFINITY, "inf"),
        ];
        for (value, text) in known {
            assert_eq!(float(value), text);
        }
    }
}
