//! `chat`: turn by turn on a terminal, or a turn per line from a pipe.

use super::args::ChatArgs;
use super::failure::Failure;
use super::generation::{Answer, generate};
use super::interrupt::{Interrupts, Wake};
use super::output;
use super::session::{Prepared, Session};
use crate::config::Config;
use crate::engine::{ErrorClass, GenerateRequest};
use crate::open::TextNeed;
use crate::prompt::{self, ChatPrompt};
use crate::sampler::{SamplingParams, draw_seed};
use serde_json::{Value, json};
use std::io::{self, BufRead, IsTerminal, stdin, stdout};
use std::sync::mpsc::{Receiver, Sender};

const HELP: &str =
    "/reset forgets the conversation, /quit or Ctrl-D ends, Ctrl-C cancels an answer, twice ends\n";

/// What was typed.
#[derive(Debug)]
enum Typed {
    Line(String),
    End,
    Failed(io::Error),
}

/// What a line asks for.
#[derive(Debug, PartialEq, Eq)]
enum Input<'a> {
    Nothing,
    Reset,
    Quit,
    Help,
    Unknown(&'a str),
    Say(&'a str),
}

fn read(line: &str) -> Input<'_> {
    let line = line.trim();
    match line {
        "" => Input::Nothing,
        "/reset" => Input::Reset,
        "/quit" => Input::Quit,
        "/help" => Input::Help,
        _ if line.starts_with('/') => Input::Unknown(line),
        _ => Input::Say(line),
    }
}

/// Talks until the user ends it.
pub fn chat(args: &ChatArgs, config: &Config) -> Result<(), Failure> {
    let interrupts = Interrupts::install()?;
    let prepared = Prepared::new(
        &args.model,
        TextNeed::Required,
        args.saved.or(args.placement.to_single_request(config)),
        config,
    )?;
    let generation = config.generation();
    let sampling = args.sampling.to_params(&generation, draw_seed());
    sampling.validate(prepared.plan.model.vocab)?;
    let session = prepared.start(&interrupts, &args.progress)?;
    let (sender, typed) = interrupts.channel();
    let lines = sender.clone();
    std::thread::Builder::new().name("keyboard".into()).spawn(move || read_lines(&lines))?;
    let mut chat = Chat {
        args,
        session: &session,
        interrupts: &interrupts,
        sampling,
        max_tokens: args.sampling.max_tokens(&generation),
        messages: args.template.system_message().into_iter().collect(),
        on_terminal: stdin().is_terminal() && stdout().is_terminal(),
    };
    chat.converse(&sender, &typed)
}

/// Passes lines on until they end.
fn read_lines(to: &Sender<Wake<Typed>>) {
    for line in stdin().lock().lines() {
        let typed = line.map_or_else(Typed::Failed, Typed::Line);
        if to.send(Wake::Item(typed)).is_err() {
            return;
        }
    }
    // The command may have ended first.
    drop(to.send(Wake::Item(Typed::End)));
}

/// A conversation.
struct Chat<'a> {
    args: &'a ChatArgs,
    session: &'a Session,
    interrupts: &'a Interrupts,
    sampling: SamplingParams,
    max_tokens: usize,
    messages: Vec<Value>,
    on_terminal: bool,
}

impl Chat<'_> {
    fn converse(
        &mut self,
        sender: &Sender<Wake<Typed>>,
        typed: &Receiver<Wake<Typed>>,
    ) -> Result<(), Failure> {
        self.tell(HELP)?;
        // Ctrl-C ends the program only when it comes twice with nothing said in between.
        let mut interrupted = false;
        loop {
            self.tell("> ")?;
            let line = match typed.recv() {
                Ok(Wake::Item(Typed::Line(line))) => line,
                Ok(Wake::Item(Typed::End)) => return self.tell("\n"),
                Ok(Wake::Item(Typed::Failed(error))) => return Err(Failure::Input(error)),
                Ok(Wake::Interrupt) if interrupted => return Err(Failure::Interrupted),
                Ok(Wake::Interrupt) => {
                    interrupted = true;
                    self.tell("\n(Ctrl-C again or Ctrl-D ends)\n")?;
                    continue;
                }
                Err(_) => return Ok(()),
            };
            interrupted = false;
            match read(&line) {
                Input::Nothing => {}
                Input::Help => output::text(HELP)?,
                Input::Reset => {
                    self.messages = self.args.template.system_message().into_iter().collect();
                    self.tell("(the conversation is empty)\n")?;
                }
                Input::Quit => return Ok(()),
                Input::Unknown(command) => {
                    output::note(&format!("error: there is no command {command}; /help lists them"));
                }
                Input::Say(text) => {
                    interrupted = self.turn(text)?;
                    self.interrupts.route(sender.clone());
                }
            }
        }
    }

    /// Answers one turn; whether the answer was cancelled. A turn that is refused leaves the conversation as it was.
    fn turn(&mut self, text: &str) -> Result<bool, Failure> {
        self.messages.push(json!({"role": "user", "content": text}));
        let answer = self.answer();
        let (completion, cancelled) = match answer {
            Ok(Answer::Complete(completion)) => (completion, false),
            Ok(Answer::Cancelled(completion)) => (completion, true),
            Err(failure) if is_refusal(&failure) => {
                self.messages.pop();
                output::note(&format!("error: {failure}; /reset starts a new conversation"));
                return Ok(false);
            }
            Err(failure) => return Err(failure),
        };
        output::text("\n")?;
        if completion.text.is_empty() && cancelled {
            self.messages.pop();
        } else {
            self.messages.push(json!({"role": "assistant", "content": completion.text}));
        }
        Ok(cancelled)
    }

    fn answer(&self) -> Result<Answer, Failure> {
        let chat = ChatPrompt {
            messages: &self.messages,
            tools: None,
            enable_thinking: self.args.template.enable_thinking,
            kwargs: &self.args.template.kwargs(),
        };
        let engine = &self.session.engine;
        let request = GenerateRequest {
            prompt: prompt::chat(engine.model(), &chat, engine.plan().limits.max_seq)?,
            max_tokens: self.max_tokens,
            sampling: self.sampling.clone(),
            stop: self.args.sampling.stop.clone(),
            ignore_eos: self.args.sampling.ignore_eos,
        };
        generate(engine, self.interrupts, request, |piece| output::text(&piece.text))
    }

    /// Writes what only a person at a terminal wants to see.
    fn tell(&self, text: &str) -> Result<(), Failure> {
        if self.on_terminal { output::text(text) } else { Ok(()) }
    }
}

/// Whether the conversation can go on: the turn was refused, nothing broke.
fn is_refusal(failure: &Failure) -> bool {
    match failure {
        Failure::Prompt(_) => true,
        Failure::Request(error) => {
            matches!(
                error.class,
                ErrorClass::Validation | ErrorClass::ContextLength | ErrorClass::Unsupported
            )
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_a_command_or_something_to_say() {
        assert_eq!(read("  \n"), Input::Nothing);
        assert_eq!(read("/reset "), Input::Reset);
        assert_eq!(read("/rest"), Input::Unknown("/rest"));
        assert_eq!(read(" hi /quit"), Input::Say("hi /quit"));
    }
}
