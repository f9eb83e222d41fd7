//! The conversation of one connection, made of the turns that were answered in full.

use serde_json::{Value, json};

/// Turns of one connection.
#[derive(Debug, Default)]
pub struct Conversation {
    /// Counts changes that make turns in flight obsolete: a reset, another model.
    era: u64,
    /// Load the turns belong to.
    model: u64,
    messages: Vec<Value>,
}

/// A turn that was begun: what it is based on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Turn {
    era: u64,
    user: String,
    system: Option<String>,
}

impl Conversation {
    /// Forgets everything, turns in flight included.
    pub fn reset(&mut self) {
        self.era += 1;
        self.messages.clear();
    }

    /// Begins a turn: the messages to answer, and what [`Conversation::join`] needs afterwards. The system prompt counts
    /// only in the first turn, and turns answered by another model are forgotten.
    pub fn begin(&mut self, model: u64, user: &str, system: Option<&str>) -> (Vec<Value>, Turn) {
        if self.model != model {
            self.reset();
            self.model = model;
        }
        let system = if self.messages.is_empty() { system } else { None };
        let turn = Turn { era: self.era, user: user.to_owned(), system: system.map(str::to_owned) };
        let mut messages = self.messages.clone();
        messages.extend(turn.opening());
        (messages, turn)
    }

    /// Whether there is anything to forget.
    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// The system prompt in force.
    pub fn system(&self) -> Option<&str> {
        let first = self.messages.first()?;
        if first["role"] == "system" { first["content"].as_str() } else { None }
    }

    /// Adds a turn with its answer, unless it has become obsolete.
    pub fn join(&mut self, turn: &Turn, answer: &str) {
        if turn.era != self.era {
            return;
        }
        if self.messages.is_empty() {
            self.messages.extend(turn.opening());
        } else {
            // Another turn was answered first; the system prompt stands at the front or not at all.
            self.messages.push(turn.user_message());
        }
        self.messages.push(json!({"role": "assistant", "content": answer}));
    }
}

impl Turn {
    fn opening(&self) -> impl Iterator<Item = Value> {
        let system = self.system.as_ref().map(|text| json!({"role": "system", "content": text}));
        system.into_iter().chain([self.user_message()])
    }

    fn user_message(&self) -> Value {
        json!({"role": "user", "content": self.user})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn roles(messages: &[Value]) -> Vec<&str> {
        messages.iter().map(|message| message["role"].as_str().unwrap()).collect()
    }

    #[test]
    fn answered_turns_are_seen_by_the_next_and_the_system_prompt_counts_once() {
        let mut conversation = Conversation::default();
        let (messages, turn) = conversation.begin(1, "a", Some("s"));
        assert_eq!(roles(&messages), ["system", "user"]);
        conversation.join(&turn, "A");
        assert_eq!(conversation.system(), Some("s"));
        let (messages, _) = conversation.begin(1, "b", Some("other"));
        assert_eq!(roles(&messages), ["system", "user", "assistant", "user"]);
        assert_eq!(messages[0]["content"], "s");
    }

    #[test]
    fn a_turn_begun_before_a_reset_or_another_model_does_not_join() {
        let mut conversation = Conversation::default();
        let (_, turn) = conversation.begin(1, "a", None);
        conversation.reset();
        conversation.join(&turn, "A");
        assert!(conversation.is_empty());
        let (_, turn) = conversation.begin(1, "a", None);
        conversation.begin(2, "b", None);
        conversation.join(&turn, "A");
        assert!(conversation.is_empty());
    }

    #[test]
    fn turns_in_flight_together_join_in_the_order_of_their_answers() {
        let mut conversation = Conversation::default();
        let (_, first) = conversation.begin(1, "a", Some("s"));
        let (_, second) = conversation.begin(1, "b", Some("t"));
        conversation.join(&second, "B");
        conversation.join(&first, "A");
        let (messages, _) = conversation.begin(1, "c", None);
        assert_eq!(roles(&messages), ["system", "user", "assistant", "user", "assistant", "user"]);
        assert_eq!((&messages[0]["content"], &messages[3]["content"]), (&json!("t"), &json!("a")));
    }
}
