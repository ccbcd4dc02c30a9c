//! The tokens of a GraphQL document, one at a time.

use std::{iter::Peekable, str::CharIndices};

/// Why a document cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} (byte {at})")]
pub(super) struct SyntaxError {
    at: usize,
    what: &'static str,
}

impl SyntaxError {
    pub(super) const fn new(at: usize, what: &'static str) -> Self {
        Self { at, what }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Token {
    Name(String),
    Number(String),
    Text(String),
    Spread,
    Mark(char),
}

pub(super) struct Tokens<'a> {
    text: &'a str,
    rest: Peekable<CharIndices<'a>>,
    /// The next token and where it begins, once it was looked at.
    next: Option<(usize, Option<Token>)>,
}

impl<'a> Tokens<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        Self { text, rest: text.char_indices().peekable(), next: None }
    }

    /// Where the next token begins, as far as is known.
    pub(super) fn at(&mut self) -> usize {
        let known = self.next.as_ref().map(|(at, _)| *at);
        known.unwrap_or_else(|| self.rest.peek().map_or(self.text.len(), |(at, _)| *at))
    }

    pub(super) fn peek(&mut self) -> Result<Option<&Token>, SyntaxError> {
        if self.next.is_none() {
            self.next = Some(self.read()?);
        }
        Ok(self.next.as_ref().and_then(|(_, token)| token.as_ref()))
    }

    pub(super) fn next(&mut self) -> Result<Option<Token>, SyntaxError> {
        match self.next.take() {
            Some((_, token)) => Ok(token),
            None => Ok(self.read()?.1),
        }
    }

    /// Takes this mark if it is next.
    pub(super) fn take(&mut self, mark: char) -> Result<bool, SyntaxError> {
        self.take_token(&Token::Mark(mark))
    }

    pub(super) fn take_spread(&mut self) -> Result<bool, SyntaxError> {
        self.take_token(&Token::Spread)
    }

    fn take_token(&mut self, wanted: &Token) -> Result<bool, SyntaxError> {
        let found = self.peek()? == Some(wanted);
        if found {
            self.next = None;
        }
        Ok(found)
    }

    pub(super) fn expect(&mut self, mark: char) -> Result<(), SyntaxError> {
        let at = self.at();
        match self.take(mark)? {
            true => Ok(()),
            false => Err(SyntaxError::new(at, "expected another sign")),
        }
    }

    fn read(&mut self) -> Result<(usize, Option<Token>), SyntaxError> {
        self.skip_ignored();
        let Some((at, first)) = self.rest.next() else { return Ok((self.text.len(), None)) };
        let token = match first {
            '{' | '}' | '(' | ')' | '[' | ']' | ':' | '=' | '!' | '$' => Token::Mark(first),
            '.' => {
                for _ in 0..2 {
                    if self.rest.next().is_none_or(|(_, dot)| dot != '.') {
                        return Err(SyntaxError::new(at, "expected `...`"));
                    }
                }
                Token::Spread
            }
            '"' => Token::Text(self.string(at)?),
            'a'..='z' | 'A'..='Z' | '_' => Token::Name(self.run(at, is_name)),
            '-' | '0'..='9' => {
                let number = self.run(at, |c| is_name(c) || matches!(c, '.' | '+' | '-'));
                Token::Number(checked(at, number)?)
            }
            _ => return Err(SyntaxError::new(at, "a sign that is not read")),
        };
        Ok((at, Some(token)))
    }

    /// Skips blanks, commas, comments and the mark of byte order.
    fn skip_ignored(&mut self) {
        while let Some((_, next)) = self.rest.peek() {
            match next {
                ' ' | '\t' | '\r' | '\n' | ',' | '\u{feff}' => drop(self.rest.next()),
                '#' => while self.rest.next_if(|(_, c)| !matches!(c, '\n' | '\r')).is_some() {},
                _ => return,
            }
        }
    }

    fn run(&mut self, from: usize, fits: impl Fn(char) -> bool) -> String {
        while self.rest.next_if(|(_, c)| fits(*c)).is_some() {}
        let end = self.rest.peek().map_or(self.text.len(), |(end, _)| *end);
        self.text[from..end].to_owned()
    }

    fn string(&mut self, at: usize) -> Result<String, SyntaxError> {
        let open = SyntaxError::new(at, "a string does not end on its line");
        let mut text = String::new();
        loop {
            match self.rest.next().ok_or(open.clone())?.1 {
                '"' if text.is_empty() && self.rest.peek().is_some_and(|(_, c)| *c == '"') => {
                    return Err(SyntaxError::new(at, "block strings are not read"));
                }
                '"' => return Ok(text),
                '\n' | '\r' => return Err(open),
                '\\' => text.push(self.escape(at)?),
                plain => text.push(plain),
            }
        }
    }

    fn escape(&mut self, at: usize) -> Result<char, SyntaxError> {
        let wrong = SyntaxError::new(at, "a string has a wrong escape");
        Ok(match self.rest.next().ok_or(wrong.clone())?.1 {
            plain @ ('"' | '\\' | '/') => plain,
            'b' => '\u{8}',
            'f' => '\u{c}',
            'n' => '\n',
            'r' => '\r',
            't' => '\t',
            'u' => {
                let mut code = 0;
                for _ in 0..4 {
                    let digit = self.rest.next().and_then(|(_, digit)| digit.to_digit(16));
                    code = code * 16 + digit.ok_or(wrong.clone())?;
                }
                // Halves of pairs are refused: `gh` writes UTF-8.
                char::from_u32(code).ok_or(wrong)?
            }
            _ => return Err(wrong),
        })
    }
}

const fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// Whole numbers alone: `gh` writes no others.
fn checked(at: usize, number: String) -> Result<String, SyntaxError> {
    let digits = number.strip_prefix('-').unwrap_or(&number);
    let plain = !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit());
    match plain && (digits == "0" || !digits.starts_with('0')) {
        true => Ok(number),
        false => Err(SyntaxError::new(at, "only whole numbers are read")),
    }
}
