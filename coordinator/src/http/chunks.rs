//! Answers in OpenAI's shapes, whole and in pieces.

use super::request::Endpoint;
use crate::engine::{Completion, Timings};
use serde_json::{Value, json};

/// What clients see as the version of whatever computes.
const FINGERPRINT: &str = concat!("spillway-", env!("CARGO_PKG_VERSION"));

/// What every piece of one answer says about itself.
#[derive(Debug, Clone)]
pub struct Frame {
    /// Which shape.
    pub endpoint: Endpoint,
    /// Id of the answer.
    pub id: String,
    /// When it was asked for, in seconds since 1970.
    pub created: u64,
    /// Name of the model.
    pub model: String,
    /// Whether a stream tells of tokens in the end. Then every piece before says that it does not yet.
    pub include_usage: bool,
}

impl Frame {
    /// The answer as one object.
    pub fn whole(&self, completion: &Completion) -> Value {
        let reason = completion.finish_reason.as_str();
        let (object, choice) = match self.endpoint {
            Endpoint::Chat => {
                let message = json!({"role": "assistant", "content": completion.text, "refusal": null});
                let choice =
                    json!({"index": 0, "message": message, "logprobs": null, "finish_reason": reason});
                ("chat.completion", choice)
            }
            Endpoint::Text => ("text_completion", text_choice(&completion.text, Some(reason))),
        };
        let mut whole = self.object(object, json!([choice]));
        whole["usage"] = usage(&completion.timings);
        whole
    }

    /// The piece before any text, where the shape has one.
    pub fn first(&self) -> Option<Value> {
        match self.endpoint {
            Endpoint::Chat => Some(self.delta(json!({"role": "assistant", "content": ""}), None)),
            Endpoint::Text => None,
        }
    }

    /// A piece of text.
    pub fn text(&self, text: &str) -> Value {
        match self.endpoint {
            Endpoint::Chat => self.delta(json!({"content": text}), None),
            Endpoint::Text => self.piece("text_completion", text_choice(text, None)),
        }
    }

    /// The piece that says why the answer ends.
    pub fn last(&self, completion: &Completion) -> Value {
        let reason = completion.finish_reason.as_str();
        match self.endpoint {
            Endpoint::Chat => self.delta(json!({}), Some(reason)),
            Endpoint::Text => self.piece("text_completion", text_choice("", Some(reason))),
        }
    }

    /// The piece with the numbers of tokens, if they are wanted.
    pub fn usage(&self, completion: &Completion) -> Option<Value> {
        let object = match self.endpoint {
            Endpoint::Chat => "chat.completion.chunk",
            Endpoint::Text => "text_completion",
        };
        self.include_usage.then(|| {
            let mut piece = self.object(object, json!([]));
            piece["usage"] = usage(&completion.timings);
            piece
        })
    }

    fn delta(&self, delta: Value, reason: Option<&str>) -> Value {
        let choice = json!({"index": 0, "delta": delta, "logprobs": null, "finish_reason": reason});
        self.piece("chat.completion.chunk", choice)
    }

    fn piece(&self, object: &str, choice: Value) -> Value {
        let mut piece = self.object(object, json!([choice]));
        if self.include_usage {
            piece["usage"] = Value::Null;
        }
        piece
    }

    fn object(&self, object: &str, choices: Value) -> Value {
        let Frame { id, created, model, .. } = self;
        json!({
            "id": id,
            "object": object,
            "created": created,
            "model": model,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        })
    }
}

fn text_choice(text: &str, reason: Option<&str>) -> Value {
    json!({"index": 0, "text": text, "logprobs": null, "finish_reason": reason})
}

fn usage(timings: &Timings) -> Value {
    let Timings { prompt_tokens, generated_tokens, cached_tokens, .. } = timings;
    json!({
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated_tokens,
        "total_tokens": prompt_tokens + generated_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    })
}
