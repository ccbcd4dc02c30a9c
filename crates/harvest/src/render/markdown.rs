//! Renders the agent's Markdown for a terminal, line by line as it streams. Pure.
//!
//! A line is parsed alone, which is enough for headings, lists, quotes, emphasis, code and links;
//! only fenced code spans lines. What has no visible form, such as a link definition, stays as it
//! was written.

use anstyle::{AnsiColor, Style};
use pulldown_cmark::{Event, Parser, Tag, TagEnd};

use crate::{sanitize::sanitize_line, style::Palette};

const RULE_COLUMNS: usize = 40;

#[derive(Debug)]
pub(super) struct Markdown {
    style: Palette,
    /// The fence that ends the current block of code.
    fence: Option<String>,
}

impl Markdown {
    pub(super) fn new(style: Palette) -> Self {
        Self { style, fence: None }
    }

    /// Code that an earlier text did not end does not go on in the next one.
    pub(super) fn end(&mut self) {
        self.fence = None;
    }

    /// Renders a sanitized line without its line end.
    pub(super) fn line(&mut self, line: &str) -> String {
        let text = line.trim_start();
        let indent = &line[..line.len() - text.len()];
        if let Some(fence) = &self.fence {
            if text.trim_end() == fence {
                self.fence = None;
                return self.style.dim(line);
            }
            return self.style.info(line);
        }
        if let Some(fence) = opening_fence(text) {
            self.fence = Some(fence);
            return self.style.dim(line);
        }
        let rendered = LineRenderer::new(self.style).render(text);
        let rendered = if rendered.is_empty() { text.to_owned() } else { rendered };
        format!("{indent}{rendered}")
    }
}

/// Renders a whole text; without styles it stays as it was written.
pub(crate) fn markdown_text(text: &str, style: Palette) -> String {
    let mut markdown = Markdown::new(style);
    let line = |line: &str| match style.is_plain() {
        true => sanitize_line(line) + "\n",
        false => markdown.line(&sanitize_line(line)) + "\n",
    };
    text.lines().map(line).collect()
}

/// The fence that ends the code that this line begins.
fn opening_fence(text: &str) -> Option<String> {
    let mark = text.chars().next().filter(|mark| ['`', '~'].contains(mark))?;
    let rest = text.trim_start_matches(mark);
    let length = text.len() - rest.len();
    // A backtick later in the line means inline code.
    (length >= 3 && !rest.contains('`')).then(|| text[..length].to_owned())
}

struct LineRenderer {
    style: Palette,
    out: String,
    /// The styles around the current text, outermost first.
    styles: Vec<Style>,
    /// The number of the next list item; `None` for a bullet.
    number: Option<u64>,
    link: Option<Link>,
}

struct Link {
    url: String,
    text: String,
}

impl LineRenderer {
    fn new(style: Palette) -> Self {
        Self { style, out: String::new(), styles: vec![Style::new()], number: None, link: None }
    }

    fn render(mut self, text: &str) -> String {
        for event in Parser::new(text) {
            match event {
                Event::Start(tag) => self.start(tag),
                Event::End(tag) => self.end(tag),
                Event::Text(text) | Event::Html(text) | Event::InlineHtml(text) => self.text(&text),
                Event::Code(code) => {
                    self.push(|style| style.fg_color(Some(AnsiColor::Cyan.into())));
                    self.text(&code);
                    self.styles.pop();
                }
                Event::Rule => self.out += &self.style.dim(&"─".repeat(RULE_COLUMNS)),
                _ => {}
            }
        }
        self.out
    }

    fn start(&mut self, tag: Tag) {
        match tag {
            Tag::Heading { .. } | Tag::Strong => self.push(Style::bold),
            Tag::Emphasis => self.push(Style::italic),
            Tag::List(number) => self.number = number,
            Tag::Item => {
                self.out += &match self.number {
                    Some(number) => format!("{number}. "),
                    None => "• ".to_owned(),
                }
            }
            Tag::BlockQuote(_) => self.out += &self.style.dim("│ "),
            Tag::Link { dest_url, .. } => {
                self.push(Style::underline);
                self.link = Some(Link { url: dest_url.into_string(), text: String::new() });
            }
            _ => {}
        }
    }

    fn end(&mut self, tag: TagEnd) {
        match tag {
            TagEnd::Heading(_) | TagEnd::Strong | TagEnd::Emphasis => drop(self.styles.pop()),
            TagEnd::Link => {
                self.styles.pop();
                // The address is never hidden behind other words.
                if let Some(link) = self.link.take().filter(|link| link.text != link.url) {
                    self.out += &self.style.dim(&format!(" ({})", sanitize_line(&link.url)));
                }
            }
            _ => {}
        }
    }

    fn push(&mut self, change: impl FnOnce(Style) -> Style) {
        let current = self.styles.last().copied().unwrap_or_default();
        self.styles.push(change(current));
    }

    fn text(&mut self, text: &str) {
        // Entities such as `&#27;` are decoded by the parser, so the text is sanitized here again.
        let text = sanitize_line(text);
        if let Some(link) = &mut self.link {
            link.text += &text;
        }
        let style = self.styles.last().copied().unwrap_or_default();
        self.out += &self.style.paint(style, &text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rendered(text: &str) -> String {
        let mut markdown = Markdown::new(Palette::new(true, None));
        text.lines().map(|line| markdown.line(line) + "\n").collect()
    }

    #[test]
    fn headings_emphasis_code_and_links_are_styled() {
        insta::assert_snapshot!(
            rendered(
                "# Result\n\nI **fixed** `add`, *really*; see [the docs](https://x.example/a).\n\
                 <https://y.example>\n---"
            )
            .replace('\x1b', "^"),
            @r"
        ^[1mResult^[0m

        I ^[1mfixed^[0m ^[36madd^[0m, ^[3mreally^[0m; see ^[4mthe docs^[0m^[2m (https://x.example/a)^[0m.
        ^[4mhttps://y.example^[0m
        ^[2m────────────────────────────────────────^[0m
        "
        );
    }

    #[test]
    fn lists_keep_their_indentation_and_numbers() {
        insta::assert_snapshot!(
            rendered("- one\n  - **two**\n    3. three\n> quoted\n- [ ] task").replace('\x1b', "^"),
            @r"
        • one
          • ^[1mtwo^[0m
            3. three
        ^[2m│ ^[0mquoted
        • [ ] task
        "
        );
    }

    #[test]
    fn fenced_code_is_not_parsed() {
        let shown = rendered("```py\n# **no**\n- x\n```\n**yes**\n~~~\n```\n~~~\n# end");
        assert!(shown.contains("\x1b[36m# **no**\x1b[0m\n\x1b[36m- x\x1b[0m\n"), "{shown:?}");
        assert!(shown.contains("\x1b[1myes\x1b[0m\n"), "{shown:?}");
        assert!(shown.ends_with("\x1b[1mend\x1b[0m\n"), "{shown:?}");
    }

    #[test]
    fn text_without_markup_is_unchanged() {
        for line in
            ["", "plain text", "[x]: https://x.example", "| a | b |", "a * b * c", "<br>", "2 < 3"]
        {
            assert_eq!(rendered(line), format!("{line}\n").repeat(line.lines().count()), "{line}");
        }
    }

    #[test]
    fn plain_text_keeps_its_markup() {
        let text = "> make it **green**\n\n- agent: `claude`\n";
        assert_eq!(markdown_text(text, Palette::default()), text);
        let shown = markdown_text(text, Palette::new(true, None)).replace('\x1b', "^");
        assert_eq!(shown, "^[2m│ ^[0mmake it ^[1mgreen^[0m\n\n• agent: ^[36mclaude^[0m\n");
    }

    #[test]
    fn decoded_entities_cannot_control_the_terminal() {
        let shown = rendered("&#27;[31m [a](http://x/&#x1b;[2J) `&#27;`");
        let own = shown.replace("\x1b[36m", "").replace("\x1b[4m", "").replace("\x1b[2m", "");
        assert!(!own.replace("\x1b[0m", "").contains('\x1b'), "{shown:?}");
    }
}
