//! Makes untrusted text safe for a terminal: text of an agent, a repository or a server must not
//! move the cursor, set the window title, inject input or reorder a line. Pure.

use std::fmt::Write;

/// Removes escape sequences. Newlines and tabs stay; other control characters become visible
/// symbols.
pub(crate) fn sanitize(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    let mut rest = text.chars();
    while let Some(next) = rest.next() {
        match next {
            '\n' | '\t' => safe.push(next),
            // Part of a CRLF; alone it would let a line overwrite itself.
            '\r' if rest.as_str().starts_with('\n') => {}
            '\u{1b}' => match skip_sequence(rest.as_str()) {
                Some(after) => rest = after.chars(),
                None => safe.push('␛'),
            },
            _ => safe.push(symbol(next).unwrap_or(next)),
        }
    }
    safe
}

/// Like [`sanitize`], on one line.
pub(crate) fn sanitize_line(text: &str) -> String {
    sanitize(text).replace(['\n', '\t'], " ")
}

/// Escapes control characters in serialized JSON, which keeps its meaning.
pub(crate) fn sanitize_json(json: String) -> String {
    // JSON escapes characters below U+0020 already.
    if !json.contains(|letter| symbol(letter).is_some() && letter > '\u{1f}') {
        return json;
    }
    let mut escaped = String::with_capacity(json.len());
    for letter in json.chars() {
        match symbol(letter) {
            // All of them are in the basic multilingual plane: one \u escape is enough.
            Some(_) if letter > '\u{1f}' => {
                write!(escaped, "\\u{:04x}", u32::from(letter))
                    .expect("writing to a String cannot fail");
            }
            _ => escaped.push(letter),
        }
    }
    escaped
}

/// The visible symbol for a control character.
fn symbol(letter: char) -> Option<char> {
    match letter {
        // Unicode has a control picture for each.
        '\0'..='\u{1f}' => char::from_u32(0x2400 + u32::from(letter)),
        '\u{7f}' => Some('␡'),
        '\u{80}'..='\u{9f}' => Some('�'),
        // Bidirectional controls reorder the text around them.
        '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
            Some('�')
        }
        _ => None,
    }
}

/// The text after the escape sequence whose ESC was just read; `None` for an incomplete one.
fn skip_sequence(text: &str) -> Option<&str> {
    match text.as_bytes().first()? {
        // ECMA-48: parameters and intermediates, then one final byte.
        b'[' => {
            let end = text[1..].find(|letter: char| !(' '..='?').contains(&letter))? + 1;
            let fits = ('@'..='~').contains(&text[end..].chars().next()?);
            fits.then(|| &text[end + 1..])
        }
        // A string command (title, clipboard, link), which ends with BEL or ST.
        b']' | b'P' | b'X' | b'^' | b'_' => {
            let end = text.find(['\u{7}', '\u{1b}', '\n'])?;
            let tail = &text[end..];
            tail.strip_prefix('\u{7}').or_else(|| tail.strip_prefix("\u{1b}\\"))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escape_sequences_are_removed_and_text_stays() {
        assert_eq!(sanitize("\x1b[31;1mFAILED\x1b[0m (2)"), "FAILED (2)");
        assert_eq!(sanitize("a\x1b]0;title\x07b\x1b]8;;http://x\x1b\\c"), "abc");
        assert_eq!(sanitize("\x1b[2J\x1b[H\x1b[?1049hx"), "x");
        assert_eq!(sanitize("ä\tb\r\nc → ✓\n"), "ä\tb\nc → ✓\n");
    }

    #[test]
    fn no_control_character_survives() {
        let nasty = "\x1b\x1b[\x1b]0;x\n\x1b[31\u{9b}31m\u{202e}evil\rgood\x08\x7f\0\x1bc\x1b[\x1b[mä\x1b]52;c;\x1b";
        let shown = sanitize(nasty);
        let is_control =
            |letter: char| symbol(letter).is_some() && letter != '\n' && letter != '\t';
        assert!(!shown.contains(is_control), "{shown:?}");
        assert_eq!(sanitize_line("one\ntwo\tthree"), "one two three");
    }

    #[test]
    fn json_keeps_meaning_without_control_characters() {
        let text = "a\u{9b}31m\u{202e}\x1b[31m\u{7f}ä";
        let json = sanitize_json(serde_json::to_string(text).unwrap());
        assert!(!json.contains(|letter| symbol(letter).is_some()), "{json:?}");
        assert_eq!(serde_json::from_str::<String>(&json).unwrap(), text);
        let pretty = sanitize_json(serde_json::to_string_pretty(&[text]).unwrap());
        assert_eq!(serde_json::from_str::<[String; 1]>(&pretty).unwrap(), [text]);
    }
}
