//! Answers as they grow: token bytes to whole characters, and stop strings that never show.
//!
//! Both types give the same text however their input is cut into portions; so a streamed answer and a collected one are equal.

/// Turns bytes that arrive in arbitrary portions into text.
///
/// A character is held back until its last byte has come. Bytes that cannot become one are replaced by U+FFFD, one for each
/// maximal part of a valid sequence, as `String::from_utf8_lossy` does with the whole.
#[derive(Debug, Clone, Default)]
pub struct Utf8Stream {
    /// An incomplete character: at most three bytes between calls.
    pending: Vec<u8>,
}

impl Utf8Stream {
    /// Takes the next bytes and appends to `out` what is certain.
    pub fn push(&mut self, bytes: &[u8], out: &mut String) {
        self.pending.extend_from_slice(bytes);
        let mut rest = self.pending.as_slice();
        loop {
            let Err(error) = std::str::from_utf8(rest).map(|valid| out.push_str(valid)) else {
                rest = &[];
                break;
            };
            let (valid, after) = rest.split_at(error.valid_up_to());
            out.push_str(&String::from_utf8_lossy(valid));
            rest = after;
            let Some(broken) = error.error_len() else { break };
            out.push(char::REPLACEMENT_CHARACTER);
            rest = &rest[broken..];
        }
        let done = self.pending.len() - rest.len();
        self.pending.drain(..done);
    }

    /// Ends the text: an incomplete character becomes U+FFFD. The stream is as new afterwards.
    pub fn finish(&mut self, out: &mut String) {
        if !self.pending.is_empty() {
            self.pending.clear();
            out.push(char::REPLACEMENT_CHARACTER);
        }
    }
}

/// A stop string and how much of it the text ends with.
#[derive(Debug, Clone)]
struct Stop {
    bytes: Vec<u8>,
    /// `fallback[i]`: length of the longest proper prefix of the stop that also ends its first `i + 1` bytes.
    fallback: Vec<usize>,
    matched: usize,
}

impl Stop {
    fn new(text: String) -> Self {
        let bytes = text.into_bytes();
        let mut fallback = vec![0; bytes.len()];
        let mut length = 0;
        for i in 1..bytes.len() {
            while length > 0 && bytes[i] != bytes[length] {
                length = fallback[length - 1];
            }
            length += usize::from(bytes[i] == bytes[length]);
            fallback[i] = length;
        }
        Self { bytes, fallback, matched: 0 }
    }

    /// Takes the next byte of the text; whether the stop is complete.
    fn advance(&mut self, byte: u8) -> bool {
        while self.matched > 0 && self.bytes[self.matched] != byte {
            self.matched = self.fallback[self.matched - 1];
        }
        self.matched += usize::from(self.bytes[self.matched] == byte);
        self.matched == self.bytes.len()
    }
}

/// Ends an answer at the first stop string that is completed, and holds back text that may become one.
///
/// Of several stops completed by the same byte the longest counts, so the text shown is the shortest.
#[derive(Debug, Clone)]
pub struct StopMatcher {
    stops: Vec<Stop>,
    /// Position of each stop in the caller's list.
    positions: Vec<usize>,
    /// Text that may be the beginning of a stop.
    held: String,
    stopped: Option<usize>,
}

impl StopMatcher {
    /// A matcher for `stops`; empty strings never match.
    pub fn new<S: Into<String>>(stops: impl IntoIterator<Item = S>) -> Self {
        let stops = stops.into_iter().map(Into::into).enumerate().filter(|(_, stop)| !stop.is_empty());
        let (positions, stops) = stops.map(|(position, stop)| (position, Stop::new(stop))).unzip();
        Self { stops, positions, held: String::new(), stopped: None }
    }

    /// Takes the next text and appends to `out` what cannot be part of a stop. Returns the position of the stop that ended the
    /// answer, now or before; nothing is shown from then on.
    pub fn push(&mut self, text: &str, out: &mut String) -> Option<usize> {
        if self.stopped.is_some() {
            return self.stopped;
        }
        let before = self.held.len();
        self.held.push_str(text);
        for (at, byte) in text.bytes().enumerate() {
            let mut completed: Option<(usize, usize)> = None; // length and position
            for (stop, &position) in self.stops.iter_mut().zip(&self.positions) {
                if stop.advance(byte) && completed.is_none_or(|(length, _)| length < stop.bytes.len()) {
                    completed = Some((stop.bytes.len(), position));
                }
            }
            if let Some((length, position)) = completed {
                out.push_str(&self.held[..before + at + 1 - length]);
                self.held.clear();
                self.stopped = Some(position);
                return self.stopped;
            }
        }
        let keep = self.stops.iter().map(|stop| stop.matched).max().unwrap_or(0);
        let show = self.held.len() - keep;
        out.push_str(&self.held[..show]);
        self.held.drain(..show);
        None
    }

    /// The answer ended for another reason: appends what was held back.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn streamed(portions: &[Vec<u8>]) -> String {
        let (mut stream, mut out) = (Utf8Stream::default(), String::new());
        for portion in portions {
            stream.push(portion, &mut out);
            assert!(stream.pending.len() < 4);
        }
        stream.finish(&mut out);
        out
    }

    /// Shown text and the stop that ended it.
    fn stopped(stops: &[&str], portions: &[&str]) -> (String, Option<usize>) {
        let (mut matcher, mut out) = (StopMatcher::new(stops.iter().copied()), String::new());
        let stop = portions.iter().fold(None, |_, portion| matcher.push(portion, &mut out));
        matcher.finish(&mut out);
        (out, stop)
    }

    /// The definition, on the whole text: the first end of any stop, the longest of those that end there.
    fn stopped_naively(stops: &[&str], text: &str) -> (String, Option<usize>) {
        for end in 0..=text.len() {
            let ending = |stop: &&str| !stop.is_empty() && text.as_bytes()[..end].ends_with(stop.as_bytes());
            let longest = stops.iter().filter(|stop| ending(stop)).map(|stop| stop.len()).max();
            if let Some(length) = longest {
                let index = stops.iter().position(|stop| stop.len() == length && ending(stop));
                return (text[..end - length].to_owned(), index);
            }
        }
        (text.to_owned(), None)
    }

    /// A character split over tokens shows when it is complete, not before and not broken.
    #[test]
    fn split_characters_wait() {
        let (mut stream, mut out) = (Utf8Stream::default(), String::new());
        for &byte in &"🦀".as_bytes()[..3] {
            stream.push(&[byte], &mut out);
            assert_eq!(out, "");
        }
        stream.push(&"🦀".as_bytes()[3..], &mut out);
        assert_eq!(out, "🦀");
    }

    /// An answer cut inside a character ends in one replacement character.
    #[test]
    fn cut_answers_end_in_one_replacement() {
        assert_eq!(streamed(&["é🦀".as_bytes()[..5].to_vec()]), "é\u{FFFD}");
        assert_eq!(streamed(&[vec![0xFF], b"a".to_vec()]), "\u{FFFD}a");
    }

    /// A stop over three tokens does not show, text before it does, and nothing after it.
    #[test]
    fn stops_across_tokens() {
        assert_eq!(stopped(&["</end>"], &["hi <", "/en", "d> more", "x"]), ("hi ".to_owned(), Some(0)));
        assert_eq!(stopped(&["</end>"], &["hi <", "/en", "x"]), ("hi </enx".to_owned(), None));
        assert_eq!(stopped(&["", "b", "ab"], &["xa", "b"]), ("x".to_owned(), Some(2)));
    }

    /// Text that cannot become a stop is shown at once.
    #[test]
    fn only_possible_stops_are_held() {
        let (mut matcher, mut out) = (StopMatcher::new(["abac"]), String::new());
        matcher.push("xaba", &mut out);
        assert_eq!(out, "x");
        matcher.push("b", &mut out);
        assert_eq!(out, "xab"); // "aba" + "b": only the last "ab" may begin a stop
    }

    proptest! {
        /// Streaming equals decoding the whole, for any bytes in any portions.
        #[test]
        fn utf8_streaming_equals_the_whole(
            portions in prop::collection::vec(prop_oneof![
                prop::collection::vec(any::<u8>(), 0..6),
                "[aé日🦀]{0,3}".prop_map(String::into_bytes),
                "🦀".prop_flat_map(|s| (0..4usize).prop_map(move |n| s.as_bytes()[n..].to_vec())),
            ], 0..12)
        ) {
            let whole = portions.concat();
            prop_assert_eq!(streamed(&portions), String::from_utf8_lossy(&whole));
        }

        /// Any portions give what the definition says about the whole text.
        #[test]
        fn stops_equal_the_definition(
            stops in prop::collection::vec("[ab日]{0,4}", 0..4),
            portions in prop::collection::vec("[ab日c]{0,4}", 0..10),
        ) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let parts: Vec<&str> = portions.iter().map(String::as_str).collect();
            prop_assert_eq!(stopped(&stops, &parts), stopped_naively(&stops, &portions.concat()));
        }
    }
}
