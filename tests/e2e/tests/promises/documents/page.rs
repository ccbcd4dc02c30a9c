//! A page taken apart: the commands that it shows, what they print, and what its comments say.

/// A part of a page that a test needs, in order.
#[derive(Debug, PartialEq)]
pub(super) enum Piece {
    /// Commands of a `prepare` comment.
    Hidden(String),
    /// Commands that the page shows.
    Shell(String),
    /// What the commands before it print.
    Output(String),
    /// A block in another language.
    Other(String),
}

/// A page.
pub(super) struct Page {
    pub(super) pieces: Vec<Piece>,
    model: String,
}

impl Page {
    pub(super) fn parse(text: &str) -> Self {
        let mut page = Self { pieces: Vec::new(), model: String::new() };
        let mut lines = text.lines();
        // Whether only empty lines follow the last commands so far.
        let mut follows = false;
        while let Some(line) = lines.next() {
            let mut until = |end: &str| {
                let inner = lines.by_ref().take_while(|line| line.trim() != end);
                inner.map(|line| format!("{line}\n")).collect::<String>()
            };
            match line.trim() {
                "" => continue,
                "<!-- prepare" => page.pieces.push(Piece::Hidden(until("-->"))),
                "<!-- model" => page.model += &until("-->"),
                "```sh" => {
                    page.pieces.push(Piece::Shell(until("```")));
                    follows = true;
                    continue;
                }
                "```text" if follows => page.pieces.push(Piece::Output(until("```"))),
                other => {
                    if let Some(language) = other.strip_prefix("```") {
                        until("```");
                        page.pieces.push(Piece::Other(language.to_owned()));
                    }
                }
            }
            follows = false;
        }
        page
    }

    /// What the model does when a prompt contains a text: a shell command.
    pub(super) fn answers(&self) -> Vec<(String, String)> {
        let pairs = self.model.lines().filter_map(|line| line.split_once(" => "));
        pairs.map(|(prompt, command)| (prompt.trim().to_owned(), command.to_owned())).collect()
    }

    /// What the blocks of commands print, by their place among the pieces.
    pub(super) fn outputs(&self) -> impl Iterator<Item = (usize, &str)> {
        self.pieces.iter().enumerate().filter_map(|(place, piece)| match piece {
            Piece::Output(text) => Some((place - 1, text.as_str())),
            _ => None,
        })
    }
}

#[test]
fn pages_are_taken_apart() {
    let text = "# A\n\n<!-- prepare\nmkdir a\n-->\n\n```sh\nls\ncd a\n```\n\n```text\na\n```\n\
                prose\n```text\na diagram\n```\n<!-- model\nfix => true\n-->\n```toml\nx = 1\n```\n";
    let page = Page::parse(text);
    let other = |language: &str| Piece::Other(language.to_owned());
    assert_eq!(
        page.pieces,
        [
            Piece::Hidden("mkdir a\n".to_owned()),
            Piece::Shell("ls\ncd a\n".to_owned()),
            Piece::Output("a\n".to_owned()),
            other("text"),
            other("toml"),
        ]
    );
    assert_eq!(page.outputs().collect::<Vec<_>>(), [(1, "a\n")]);
    assert_eq!(page.answers(), [("fix".to_owned(), "true".to_owned())]);
}
