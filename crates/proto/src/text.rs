//! Macros for types that are texts outside of the program: enums with one word per variant, and
//! texts that follow a rule. Each is parsed once, where it enters, and refused with a plain error.

/// An enum whose variants are words: the same in JSON, in the database and on the command line.
macro_rules! word_enum {
    (
        $(#[$doc:meta])*
        $name:ident, $what:literal {
            $($(#[$variant_doc:meta])* $variant:ident = $word:literal,)+
        }
    ) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
        #[serde(try_from = "String", into = "String")]
        #[cfg_attr(
            feature = "openapi",
            derive(utoipa::ToSchema),
            schema(rename_all = "snake_case")
        )]
        pub enum $name {
            $($(#[$variant_doc])* $variant,)+
        }

        impl $name {
            /// All values, in the order of their declaration.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)+];

            /// The words of all values.
            pub const WORDS: &'static [&'static str] = &[$($word,)+];

            /// The word of this value.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $word,)+
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                out.pad(self.as_str())
            }
        }

        impl std::str::FromStr for $name {
            type Err = $crate::text::UnknownWord;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                match text {
                    $($word => Ok(Self::$variant),)+
                    _ => Err($crate::text::UnknownWord::new($what, text, Self::WORDS)),
                }
            }
        }

        $crate::text::string_conversions!($name, $crate::text::UnknownWord);
    };
}

/// A text that follows a rule. `$check` returns the error of a text that does not.
macro_rules! checked_text {
    ($(#[$doc:meta])* $name:ident, $error:ty, $check:path) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
        #[serde(try_from = "String", into = "String")]
        #[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(value_type = String))]
        pub struct $name(String);

        impl $name {
            /// The text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl std::ops::Deref for $name {
            type Target = str;

            fn deref(&self) -> &str {
                &self.0
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }

        impl PartialEq<str> for $name {
            fn eq(&self, other: &str) -> bool {
                self.0 == other
            }
        }

        impl PartialEq<&str> for $name {
            fn eq(&self, other: &&str) -> bool {
                self.0 == *other
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                out.pad(&self.0)
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                std::fmt::Debug::fmt(&self.0, out)
            }
        }

        impl std::str::FromStr for $name {
            type Err = $error;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                $check(text)?;
                Ok(Self(text.to_owned()))
            }
        }

        $crate::text::string_conversions!($name, $error);
    };
}

/// Conversions from and to `String`, as serde needs them, by way of `FromStr` and `Display`.
macro_rules! string_conversions {
    ($name:ident, $error:ty) => {
        impl TryFrom<String> for $name {
            type Error = $error;

            fn try_from(text: String) -> Result<Self, Self::Error> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(value: $name) -> Self {
                value.to_string()
            }
        }
    };
}

pub(crate) use {checked_text, string_conversions, word_enum};

// Enough to recognize a typing error.
const QUOTED_CHARACTERS: usize = 100;

/// The text is none of the words that the type has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown {what} `{text}`; use {}", list(.words))]
pub struct UnknownWord {
    what: &'static str,
    text: String,
    words: &'static [&'static str],
}

impl UnknownWord {
    pub(crate) fn new(what: &'static str, text: &str, words: &'static [&'static str]) -> Self {
        Self { what, text: quoted(text), words }
    }
}

/// Maximum length of a name in the configuration.
pub(crate) const MAX_PLAIN_NAME: usize = 32;

/// Whether a text is 1 to 32 small letters, digits and `-`, and no option of a command.
pub(crate) fn is_plain_name(name: &str) -> bool {
    (1..=MAX_PLAIN_NAME).contains(&name.len())
        && name.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-'))
        && !name.starts_with('-')
}

/// The beginning of a text, for an error message.
pub(crate) fn quoted(text: &str) -> String {
    text.chars().take(QUOTED_CHARACTERS).collect()
}

fn list(words: &[&str]) -> String {
    let words: Vec<_> = words.iter().map(|word| format!("`{word}`")).collect();
    match words.as_slice() {
        [first @ .., last] if !first.is_empty() => format!("{} or {last}", first.join(", ")),
        _ => words.concat(),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::{fmt, str::FromStr};

    use serde::{Serialize, de::DeserializeOwned};

    /// Parses a text that must be valid, and back through `Display` and JSON.
    pub(crate) fn round_trip<T>(text: &str) -> T
    where
        T: FromStr<Err: fmt::Debug> + fmt::Display + fmt::Debug + PartialEq,
        T: Serialize + DeserializeOwned,
    {
        let parsed: T = text.parse().unwrap();
        assert_eq!(parsed.to_string(), text);
        let json = serde_json::to_string(&parsed).unwrap();
        assert_eq!(serde_json::from_str::<T>(&json).unwrap(), parsed);
        parsed
    }
}
