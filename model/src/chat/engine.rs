//! The template engine, set up as the Jinja environment that chat templates are written for.
//!
//! That is: `trim_blocks`, `lstrip_blocks`, loop controls, no escaping, lenient undefined values, Python's methods on strings
//! and mappings, Python's spelling of values. A template comes from a file somebody else made, so a render has a budget
//! of work and memory and a limit of recursion.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Value, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State, UndefinedBehavior};
use minijinja_contrib::pycompat;

use super::error::TemplateError;
use super::json;
use super::python;
use super::values::Converter;

/// The only template in the environment.
pub(super) const TEMPLATE: &str = "chat template";

/// Most bytes of template source accepted; the largest published ones have about 20 KB.
const MAX_SOURCE_BYTES: usize = 1 << 16;

/// Stack of the thread that compiles. The compiler recurses for every operator of an expression, half a kilobyte each, so
/// this is enough for a template that is nothing but operators.
const COMPILE_STACK: usize = 1 << 26;

/// Budget of a render before the conversation counts: an instruction costs one, 64 bytes of data cost one.
const BASE_FUEL: u64 = 500_000;

/// Budget that each byte of a conversation adds: real templates copy a text about ten times.
const FUEL_PER_BYTE: u64 = 1;

/// Budget that each value of a conversation adds; a message of two texts is three values.
const FUEL_PER_VALUE: u64 = 200;

/// Levels of nested blocks, macros and calls.
const RECURSION: usize = 200;

/// What a template passed to `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

/// The budget for rendering what `converter` has converted.
pub(super) fn fuel(converter: &Converter) -> u64 {
    BASE_FUEL + converter.bytes * FUEL_PER_BYTE + converter.values * FUEL_PER_VALUE
}

/// Compiles `source`, whatever it is, without overflowing the stack.
pub(super) fn compile(source: &str) -> Result<Environment<'static>, TemplateError> {
    if source.len() > MAX_SOURCE_BYTES {
        return Err(TemplateError::TooLarge { found: source.len(), limit: MAX_SOURCE_BYTES });
    }
    with_compile_stack(|| environment(source))
}

/// Whether the template of `environment` reads a variable that it does not set itself.
pub(super) fn reads(environment: &Environment<'static>, name: &str) -> Result<bool, TemplateError> {
    with_compile_stack(|| {
        let template = environment.get_template(TEMPLATE).map_err(|error| template_error(&error))?;
        Ok(template.undeclared_variables(false).contains(name))
    })
}

/// Runs what recurses over the source of a template.
fn with_compile_stack<T: Send>(
    work: impl FnOnce() -> Result<T, TemplateError> + Send,
) -> Result<T, TemplateError> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("template".to_owned()).stack_size(COMPILE_STACK);
        let done = thread.spawn_scoped(scope, work).map(|thread| thread.join());
        match done {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => {
                Err(TemplateError::Compiler { reason: "the template compiler panicked".to_owned() })
            }
            Err(error) => {
                Err(TemplateError::Compiler { reason: format!("no thread to compile it on: {error}") })
            }
        }
    })
}

fn environment(source: &str) -> Result<Environment<'static>, TemplateError> {
    let mut env = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    env.set_syntax(syntax.map_err(|error| template_error(&error))?);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_undefined_behavior(UndefinedBehavior::Lenient);
    env.set_recursion_limit(RECURSION);
    env.set_formatter(write_value);
    env.set_unknown_method_callback(call_method);
    env.add_function("raise_exception", raise_exception);
    env.add_filter("tojson", json::tojson);
    env.add_filter("string", string);
    env.add_filter("trim", trim);
    env.add_test("iterable", is_iterable);
    env.add_template_owned(TEMPLATE, source.to_owned()).map_err(|error| template_error(&error))?;
    Ok(env)
}

/// Sorts an engine error by what the user can do about it.
pub(super) fn template_error(error: &Error) -> TemplateError {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    let mut line = error.line().unwrap_or(0);
    while let Some(cause) = source {
        if let Some(Raised(message)) = cause.downcast_ref() {
            return TemplateError::Refused { message: message.clone() };
        }
        if let Some(inner) = cause.downcast_ref::<Error>() {
            if inner.kind() == ErrorKind::OutOfFuel {
                return TemplateError::OutOfFuel;
            }
            line = inner.line().unwrap_or(line);
        }
        source = cause.source();
    }
    let message =
        error.detail().map_or_else(|| error.kind().to_string(), |d| format!("{}: {d}", error.kind()));
    match error.kind() {
        ErrorKind::SyntaxError | ErrorKind::BadEscape => TemplateError::Syntax { line, message },
        _ => TemplateError::Render { line, message },
    }
}

fn write_value(out: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => Ok(out.write_str(text)?),
        None => python::write_str(out, state, value),
    }
}

fn raise_exception(state: &State<'_, '_>, message: &Value) -> Result<Value, Error> {
    let message = string(state, message)?.to_string();
    Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
}

/// `str(value)` as a value.
fn string(state: &State<'_, '_>, value: &Value) -> Result<Value, Error> {
    if value.as_str().is_some() {
        return Ok(value.clone());
    }
    let mut out = String::new();
    python::write_str(&mut out, state, value)?;
    Ok(Value::from(out))
}

fn trim(state: &State<'_, '_>, value: &Value, chars: Option<&str>) -> Result<Value, Error> {
    let text = string(state, value)?;
    Ok(Value::from(strip(text.as_str().unwrap_or_default(), chars, Side::Both)))
}

fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// Which end of a string is stripped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Left,
    Right,
    Both,
}

/// `str.strip` and its siblings: removes `chars`, or what Python counts as white space.
fn strip<'t>(text: &'t str, chars: Option<&str>, side: Side) -> &'t str {
    let goes = |c: char| chars.map_or_else(|| python::is_space(c), |chars| chars.contains(c));
    let text = if side == Side::Right { text } else { text.trim_start_matches(goes) };
    if side == Side::Left { text } else { text.trim_end_matches(goes) }
}

/// Python's methods: those whose idea of white space or of none differs from the general implementation, then that one.
fn call_method(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    if let (ValueKind::String, Some(text)) = (value.kind(), value.as_str()) {
        let stripped = |side| {
            let (chars,): (Option<&str>,) = minijinja::value::from_args(args)?;
            Ok(Value::from(strip(text, chars, side)))
        };
        match method {
            "strip" => return stripped(Side::Both),
            "lstrip" => return stripped(Side::Left),
            "rstrip" => return stripped(Side::Right),
            "split" if args.first().is_none_or(Value::is_none) && args.len() < 2 => {
                let words = text.split(python::is_space).filter(|word| !word.is_empty());
                return Ok(words.map(Value::from).collect());
            }
            "removeprefix" | "removesuffix" => {
                let (affix,): (&str,) = minijinja::value::from_args(args)?;
                let rest = if method == "removeprefix" {
                    text.strip_prefix(affix)
                } else {
                    text.strip_suffix(affix)
                };
                return Ok(Value::from(rest.unwrap_or(text)));
            }
            _ => {}
        }
    }
    pycompat::unknown_method_callback(state, value, method, args)
}
