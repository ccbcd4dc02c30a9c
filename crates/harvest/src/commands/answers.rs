//! Answers to the agent's questions, typed on the terminal.

use std::io::{self, BufRead};

use harvest_proto::PromptText;
use tokio::sync::mpsc::{self, UnboundedReceiver};

use crate::{follow::Question, printer::Printer};

const PROMPT: &str = "answer> ";

/// Reads answers while a question is open. Without a terminal nothing is asked.
pub(super) struct Answers {
    print: Printer,
    /// Typed lines; reading starts with the first question.
    lines: Option<UnboundedReceiver<String>>,
    /// The question that was asked last.
    asked: Option<Question>,
    /// Whether that question has no answer yet.
    waits: bool,
}

impl Answers {
    pub(super) fn new(print: Printer) -> Self {
        Self { print, lines: None, asked: None, waits: false }
    }

    /// Asks a question once.
    pub(super) fn ask(&mut self, question: &Question) {
        let lines = self.lines.get_or_insert_with(read_lines);
        if self.asked.as_ref() != Some(question) {
            // What was typed before the question is not its answer.
            while lines.try_recv().is_ok() {}
            self.asked = Some(question.clone());
            self.waits = true;
            self.print.prompt(PROMPT);
        }
    }

    /// Whether a question waits for its answer: the terminal's last line is the user's.
    pub(super) fn waits(&self) -> bool {
        self.waits
    }

    /// Prints the prompt again below what was printed since.
    pub(super) fn repeat(&self) {
        self.print.prompt(PROMPT);
    }

    /// Ends the line of a question that is not answered here.
    pub(super) fn withdraw(&mut self) {
        self.asked = None;
        if std::mem::take(&mut self.waits) {
            self.print.note("");
        }
    }

    /// The next answer, or `None` at the end of the input; waits forever while nothing is asked.
    pub(super) async fn next(&mut self) -> Option<PromptText> {
        let (Some(lines), Some(question)) =
            (&mut self.lines, self.asked.as_ref().filter(|_| self.waits))
        else {
            return std::future::pending().await;
        };
        let answer = loop {
            let line = lines.recv().await?;
            if let Some(answer) = choose(&line, &question.options) {
                break answer;
            }
            self.print.prompt(PROMPT);
        };
        self.waits = false;
        Some(answer)
    }
}

/// Reads lines on a thread, since reads from a terminal block.
fn read_lines() -> UnboundedReceiver<String> {
    let (sender, lines) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        let mut input = io::stdin().lock().lines();
        while let Some(Ok(line)) = input.next() {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    lines
}

/// The typed text, or the option of that number; `None` if nothing was typed.
fn choose(typed: &str, options: &[String]) -> Option<PromptText> {
    let typed = typed.trim();
    let number = typed.parse::<usize>().ok().and_then(|number| number.checked_sub(1));
    let option = number.and_then(|index| options.get(index));
    option.map_or(typed, String::as_str).parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_chooses_an_option() {
        let options = ["tabs".to_owned(), "spaces".to_owned()];
        let chosen = |typed: &str| choose(typed, &options).map(|text| text.as_str().to_owned());
        assert_eq!(chosen("2\n").as_deref(), Some("spaces"));
        assert_eq!(chosen(" neither ").as_deref(), Some("neither"));
        assert_eq!(chosen("3").as_deref(), Some("3"));
        assert_eq!(chosen("0").as_deref(), Some("0"));
        assert_eq!(chosen("  "), None);
    }
}
