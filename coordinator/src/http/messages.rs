//! Messages as OpenAI's clients send them, as chat templates know them: roles that templates have, contents as texts, arguments
//! of tool calls as objects.

use super::error::ApiError;
use serde_json::{Map, Value};
use spillway_protocol::jsonl::{LineError, describe};

/// Roles of messages. `developer` is OpenAI's newer word for `system`, which is the one that templates know.
const ROLES: &[(&str, &str)] = &[
    ("system", "system"),
    ("developer", "system"),
    ("user", "user"),
    ("assistant", "assistant"),
    ("tool", "tool"),
];

/// Between the text parts of a message.
const PART_SEPARATOR: &str = "\n";

/// Checks messages and puts them into the form that templates know. What else a message has is left to the template.
pub fn normalise(messages: Vec<Value>) -> Result<Vec<Value>, ApiError> {
    if messages.is_empty() {
        let message = "\"messages\" is empty; send at least one message";
        return Err(ApiError::field("empty_messages", "messages", message));
    }
    messages.into_iter().enumerate().map(|(index, message)| normalise_one(index, message)).collect()
}

fn normalise_one(index: usize, message: Value) -> Result<Value, ApiError> {
    let Value::Object(mut map) = message else {
        return Err(wrong_type(&format!("messages[{index}]"), "an object", &message));
    };
    let role = role(index, &map)?;
    map.insert("role".to_owned(), Value::from(role));
    normalise_tool_calls(index, &mut map)?;
    let content = match map.get("content") {
        // An assistant that only called tools says nothing; templates want a text all the same.
        None | Some(Value::Null) if role == "assistant" && map.contains_key("tool_calls") => String::new(),
        content => text(index, content)?,
    };
    map.insert("content".to_owned(), Value::from(content));
    Ok(Value::Object(map))
}

fn role(index: usize, message: &Map<String, Value>) -> Result<&'static str, ApiError> {
    let param = format!("messages[{index}].role");
    let known = || ROLES.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
    match message.get("role") {
        Some(Value::String(role)) => match ROLES.iter().find(|(name, _)| name == role) {
            Some((_, template)) => Ok(template),
            None => {
                let found = describe(&Value::from(role.as_str()));
                let message = format!("the field \"{param}\" is {found}; known: {}", known());
                Err(ApiError::field("unknown_role", param, message))
            }
        },
        None | Some(Value::Null) => {
            let message = format!("the field \"{param}\" is missing; send one of {}", known());
            Err(ApiError::field("missing_field", param, message))
        }
        Some(other) => Err(wrong_type(&param, "a string", other)),
    }
}

/// The text of a message: a string, or the texts of its parts.
fn text(index: usize, content: Option<&Value>) -> Result<String, ApiError> {
    let param = format!("messages[{index}].content");
    match content {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(parts)) => {
            let part = |(at, part)| part_text(&format!("{param}[{at}]"), part);
            let texts: Vec<&str> = parts.iter().enumerate().map(part).collect::<Result<_, _>>()?;
            Ok(texts.join(PART_SEPARATOR))
        }
        None | Some(Value::Null) => {
            let message = format!("the field \"{param}\" is missing; send a string");
            Err(ApiError::field("missing_field", param, message))
        }
        Some(other) => Err(wrong_type(&param, "a string or an array of text parts", other)),
    }
}

fn part_text<'a>(param: &str, part: &'a Value) -> Result<&'a str, ApiError> {
    match (part["type"].as_str(), &part["text"]) {
        (Some("text"), Value::String(text)) => Ok(text),
        (Some("text"), other) => Err(wrong_type(&format!("{param}.text"), "a string", other)),
        (Some(_), _) => {
            let found = describe(&part["type"]);
            let message = format!(
                "the type of \"{param}\" is {found}, but this program reads text only; send parts of type \"text\""
            );
            Err(ApiError::field("content_unsupported", param, message))
        }
        (None, _) => Err(wrong_type(param, "an object with a type", part)),
    }
}

/// Clients send the arguments of calls as JSON in a string; templates go through them as objects. A list without calls is none.
fn normalise_tool_calls(index: usize, message: &mut Map<String, Value>) -> Result<(), ApiError> {
    match message.get_mut("tool_calls") {
        None => return Ok(()),
        Some(Value::Array(calls)) if !calls.is_empty() => {
            for call in calls {
                if let Some(arguments) = call.pointer_mut("/function/arguments")
                    && let Some(text) = arguments.as_str()
                    && let Ok(parsed) = serde_json::from_str::<Map<String, Value>>(text)
                {
                    *arguments = Value::Object(parsed);
                }
            }
            return Ok(());
        }
        Some(Value::Array(_) | Value::Null) => {}
        Some(other) => {
            return Err(wrong_type(&format!("messages[{index}].tool_calls"), "an array", other));
        }
    }
    message.remove("tool_calls");
    Ok(())
}

fn wrong_type(param: &str, expected: &'static str, found: &Value) -> ApiError {
    LineError::WrongType { field: param.to_owned(), expected, found: describe(found) }.into()
}
