//! The `tojson` filter: Python's `json.dumps` with the defaults that chat templates are rendered with.

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind, State};
use std::fmt::Write;

/// Widest indentation accepted, in spaces.
const MAX_INDENT: usize = 64;

/// How `json.dumps` lays its output out.
#[derive(Debug)]
struct Style {
    ensure_ascii: bool,
    /// Spaces a level; `None` keeps everything on one line.
    indent: Option<usize>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
}

impl Style {
    /// Reads the filter's arguments, named as in Python.
    fn new(args: &Kwargs) -> Result<Self, Error> {
        let indent = match args.get::<Option<usize>>("indent")? {
            Some(indent) if indent > MAX_INDENT => {
                return Err(failed(format!("tojson: an indent of {indent} is too wide")));
            }
            indent => indent,
        };
        let separators: Option<Vec<String>> = args.get("separators")?;
        let (item_separator, key_separator) = match separators.as_deref() {
            None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
            Some([item, key]) => (item.clone(), key.clone()),
            Some(_) => return Err(failed("tojson: separators must be two strings".to_owned())),
        };
        let style = Self {
            ensure_ascii: args.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
            indent,
            item_separator,
            key_separator,
            sort_keys: args.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        };
        args.assert_all_used()?;
        Ok(style)
    }
}

fn failed(detail: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, detail)
}

/// The filter.
pub(super) fn tojson(state: &State<'_, '_>, value: &Value, args: Kwargs) -> Result<Value, Error> {
    let mut writer = Writer { state, style: Style::new(&args)?, out: String::new(), level: 0 };
    writer.value(value)?;
    Ok(Value::from(writer.out))
}

struct Writer<'w, 'template, 'env> {
    state: &'w State<'template, 'env>,
    style: Style,
    out: String,
    level: usize,
}

impl Writer<'_, '_, '_> {
    fn value(&mut self, value: &Value) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.number(value),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => self.items('[', ']', value.try_iter()?, Self::value)?,
            ValueKind::Map => {
                let mut keys = value.try_iter()?.collect::<Vec<_>>();
                if self.style.sort_keys {
                    keys.sort();
                }
                self.items('{', '}', keys.into_iter(), |writer, key| {
                    writer.key(key)?;
                    writer.out.push_str(&writer.style.key_separator);
                    writer.value(&value.get_item(key)?)
                })?;
            }
            kind => return Err(failed(format!("tojson: {kind} is not JSON serializable"))),
        }
        Ok(())
    }

    /// Writes the items of a container. Each is charged: a short template can make a list that is too long to walk.
    fn items(
        &mut self,
        open: char,
        close: char,
        items: impl Iterator<Item = Value>,
        mut each: impl FnMut(&mut Self, &Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push(open);
        self.level += 1;
        let mut empty = true;
        for item in items {
            self.state.consume_fuel(1)?;
            if !empty {
                self.out.push_str(&self.style.item_separator);
            }
            empty = false;
            self.line_break();
            each(self, &item)?;
        }
        self.level -= 1;
        if !empty {
            self.line_break();
        }
        self.out.push(close);
        Ok(())
    }

    fn line_break(&mut self) {
        if let Some(indent) = self.style.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', indent * self.level));
        }
    }

    fn number(&mut self, value: &Value) {
        let float = if value.is_integer() { None } else { f64::try_from(value.clone()).ok() };
        // Writing to a String cannot fail.
        let _ = match float {
            Some(float) if float.is_nan() => self.out.write_str("NaN"),
            Some(float) if float.is_infinite() => {
                self.out.write_str(if float > 0.0 { "Infinity" } else { "-Infinity" })
            }
            Some(float) => super::python::write_float(&mut self.out, float),
            None => write!(self.out, "{value}"),
        };
    }

    /// Keys are strings; numbers, truth values and none become strings.
    fn key(&mut self, key: &Value) -> Result<(), Error> {
        if let Some(text) = key.as_str() {
            self.string(text);
            return Ok(());
        }
        self.out.push('"');
        self.value(key)?;
        self.out.push('"');
        Ok(())
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{C}' => self.out.push_str("\\f"),
                c if c < ' ' || (self.style.ensure_ascii && c > '~') => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(self.out, "\\u{unit:04x}");
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}
