//! The part of GraphQL that documents of `gh` use, parsed into a tree: operations, fragments,
//! variables, aliases and literals. Directives, block strings and definitions of types are refused.
//! Text, tokens and depth are limited; parsing takes one pass. Nothing is executed.

use super::tokens::{SyntaxError, Token, Tokens};

// The longest document of `gh` has 6 KiB.
const MAX_TEXT_BYTES: usize = 32 * 1024;
// Those of `gh` have ten levels.
const MAX_DEPTH: usize = 24;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Document {
    pub(super) operations: Vec<OperationDefinition>,
    pub(super) fragments: Vec<FragmentDefinition>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct OperationDefinition {
    pub(super) kind: OperationKind,
    pub(super) name: Option<String>,
    pub(super) variables: Vec<VariableDefinition>,
    pub(super) selections: Vec<Selection>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OperationKind {
    Query,
    Mutation,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct VariableDefinition {
    name: String,
    of: TypeReference,
    default: Option<Literal>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum TypeReference {
    Named { name: String, required: bool },
    List { of: Box<TypeReference>, required: bool },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FragmentDefinition {
    pub(super) name: String,
    pub(super) on: String,
    pub(super) selections: Vec<Selection>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Selection {
    Field(SelectedField),
    Spread(String),
    Inline { on: Option<String>, selections: Vec<Selection> },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SelectedField {
    pub(super) alias: Option<String>,
    pub(super) name: String,
    pub(super) arguments: Vec<(String, Literal)>,
    pub(super) selections: Vec<Selection>,
}

impl SelectedField {
    /// The name of the field in the answer.
    pub(super) fn key(&self) -> &str {
        self.alias.as_deref().unwrap_or(&self.name)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Literal {
    Variable(String),
    Number(String),
    Text(String),
    /// `true`, `false`, `null` or a value of an enumeration.
    Word(String),
    List(Vec<Literal>),
    Object(Vec<(String, Literal)>),
}

impl Document {
    pub(super) fn parse(text: &str) -> Result<Self, SyntaxError> {
        if text.len() > MAX_TEXT_BYTES {
            return Err(SyntaxError::new(text.len(), "the document is too long"));
        }
        let mut parser = Parser { tokens: Tokens::new(text), depth: 0 };
        let (mut operations, mut fragments) = (Vec::new(), Vec::new());
        while parser.tokens.peek()?.is_some() {
            match parser.definition()? {
                Definition::Operation(operation) => operations.push(operation),
                Definition::Fragment(fragment) => fragments.push(fragment),
            }
        }
        Ok(Self { operations, fragments })
    }
}

enum Definition {
    Operation(OperationDefinition),
    Fragment(FragmentDefinition),
}

struct Parser<'a> {
    tokens: Tokens<'a>,
    depth: usize,
}

impl Parser<'_> {
    fn definition(&mut self) -> Result<Definition, SyntaxError> {
        if self.tokens.peek()? == Some(&Token::Mark('{')) {
            let (name, variables) = Default::default();
            let (kind, selections) = (OperationKind::Query, self.selections()?);
            return Ok(Definition::Operation(OperationDefinition {
                kind,
                name,
                variables,
                selections,
            }));
        }
        let at = self.tokens.at();
        let kind = match self.name()?.as_str() {
            "query" => OperationKind::Query,
            "mutation" => OperationKind::Mutation,
            "fragment" => return self.fragment().map(Definition::Fragment),
            _ => {
                return Err(SyntaxError::new(at, "only queries, mutations and fragments are read"));
            }
        };
        let named = matches!(self.tokens.peek()?, Some(Token::Name(_)));
        let name = named.then(|| self.name()).transpose()?;
        let variables = self.variables()?;
        let selections = self.selections()?;
        Ok(Definition::Operation(OperationDefinition { kind, name, variables, selections }))
    }

    fn fragment(&mut self) -> Result<FragmentDefinition, SyntaxError> {
        let name = self.name()?;
        self.keyword("on")?;
        Ok(FragmentDefinition { name, on: self.name()?, selections: self.selections()? })
    }

    fn variables(&mut self) -> Result<Vec<VariableDefinition>, SyntaxError> {
        let mut variables = Vec::new();
        if !self.tokens.take('(')? {
            return Ok(variables);
        }
        while !self.tokens.take(')')? {
            self.tokens.expect('$')?;
            let name = self.name()?;
            self.tokens.expect(':')?;
            let of = self.type_reference()?;
            let default = self.tokens.take('=')?.then(|| self.literal()).transpose()?;
            variables.push(VariableDefinition { name, of, default });
        }
        Ok(variables)
    }

    fn type_reference(&mut self) -> Result<TypeReference, SyntaxError> {
        self.descend(|parser| {
            if parser.tokens.take('[')? {
                let of = Box::new(parser.type_reference()?);
                parser.tokens.expect(']')?;
                return Ok(TypeReference::List { of, required: parser.tokens.take('!')? });
            }
            Ok(TypeReference::Named { name: parser.name()?, required: parser.tokens.take('!')? })
        })
    }

    /// A selection set in braces. An empty one is refused.
    fn selections(&mut self) -> Result<Vec<Selection>, SyntaxError> {
        self.descend(|parser| {
            parser.tokens.expect('{')?;
            let mut selections = vec![parser.selection()?];
            while !parser.tokens.take('}')? {
                selections.push(parser.selection()?);
            }
            Ok(selections)
        })
    }

    fn selection(&mut self) -> Result<Selection, SyntaxError> {
        if self.tokens.take_spread()? {
            if self.tokens.peek()? == Some(&Token::Mark('{')) {
                return Ok(Selection::Inline { on: None, selections: self.selections()? });
            }
            let name = self.name()?;
            if name != "on" {
                return Ok(Selection::Spread(name));
            }
            let on = Some(self.name()?);
            return Ok(Selection::Inline { on, selections: self.selections()? });
        }
        let first = self.name()?;
        let (alias, name) = match self.tokens.take(':')? {
            true => (Some(first), self.name()?),
            false => (None, first),
        };
        let arguments = if self.tokens.take('(')? { self.pairs(')')? } else { Vec::new() };
        let below = self.tokens.peek()? == Some(&Token::Mark('{'));
        let selections = if below { self.selections()? } else { Vec::new() };
        Ok(Selection::Field(SelectedField { alias, name, arguments, selections }))
    }

    fn pairs(&mut self, end: char) -> Result<Vec<(String, Literal)>, SyntaxError> {
        let mut pairs: Vec<(String, Literal)> = Vec::new();
        while !self.tokens.take(end)? {
            let at = self.tokens.at();
            let name = self.name()?;
            if pairs.iter().any(|(known, _)| *known == name) {
                return Err(SyntaxError::new(at, "a name is given twice"));
            }
            self.tokens.expect(':')?;
            pairs.push((name, self.literal()?));
        }
        Ok(pairs)
    }

    fn literal(&mut self) -> Result<Literal, SyntaxError> {
        self.descend(|parser| {
            let at = parser.tokens.at();
            Ok(match parser.tokens.next()? {
                Some(Token::Mark('$')) => Literal::Variable(parser.name()?),
                Some(Token::Number(number)) => Literal::Number(number),
                Some(Token::Text(text)) => Literal::Text(text),
                Some(Token::Name(word)) => Literal::Word(word),
                Some(Token::Mark('{')) => Literal::Object(parser.pairs('}')?),
                Some(Token::Mark('[')) => {
                    let mut items = Vec::new();
                    while !parser.tokens.take(']')? {
                        items.push(parser.literal()?);
                    }
                    Literal::List(items)
                }
                _ => return Err(SyntaxError::new(at, "expected a value")),
            })
        })
    }

    fn name(&mut self) -> Result<String, SyntaxError> {
        let at = self.tokens.at();
        match self.tokens.next()? {
            Some(Token::Name(name)) => Ok(name),
            _ => Err(SyntaxError::new(at, "expected a name")),
        }
    }

    fn keyword(&mut self, word: &str) -> Result<(), SyntaxError> {
        let at = self.tokens.at();
        match self.name()? == word {
            true => Ok(()),
            false => Err(SyntaxError::new(at, "expected `on`")),
        }
    }

    fn descend<T>(
        &mut self,
        parse: impl FnOnce(&mut Self) -> Result<T, SyntaxError>,
    ) -> Result<T, SyntaxError> {
        if self.depth == MAX_DEPTH {
            return Err(SyntaxError::new(self.tokens.at(), "the document is nested too deeply"));
        }
        self.depth += 1;
        let parsed = parse(self);
        self.depth -= 1;
        parsed
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(text: &str) -> Result<Document, String> {
        Document::parse(text).map_err(|error| error.to_string())
    }

    #[test]
    fn layout_and_comments_do_not_matter() {
        let plain =
            parse("query A($a:[Int!]=[1,2]){b:c(d:{e:$a f:\"x\"}){...on G{h}...i}}").unwrap();
        let spaced = "\u{feff}query A( $a : [Int !] = [1 2] ) # é }\n\
                      { b : c (d: {e: $a, f: \"\\u0078\"})\r\n{, ... on G { h } ... i } }";
        assert_eq!(parse(spaced).unwrap(), plain);
        assert_eq!(plain.operations.len(), 1);
    }

    #[test]
    fn what_gh_never_writes_is_refused() {
        for text in [
            "",
            "{a @skip(if: true)}",
            "{}",
            "{a(b:1,b:2)}",
            "{a(b:\"\"\"x\"\"\")}",
            "subscription{a}",
            "type A {b: C}",
            "{a(b:01)}",
            "{a(b:\"\n\")}",
            "{a(b:\"\\ud800\")}",
            "{a",
            "{a}}",
            "{\0}",
            "fragment on on on{a}x",
        ] {
            let parsed = parse(text);
            assert!(parsed.as_ref().is_ok_and(|all| all.operations.is_empty()) || parsed.is_err());
        }
        let deep = format!("{}{}", "{a".repeat(30), "}".repeat(30));
        assert_eq!(parse(&deep).unwrap_err(), "the document is nested too deeply (byte 48)");
        let lists = format!("{{a(b:{})}}", "[".repeat(10_000));
        assert!(parse(&lists).unwrap_err().contains("nested too deeply"));
        assert!(parse(&" ".repeat(40_000)).unwrap_err().contains("too long"));
    }

    proptest! {
        #[test]
        fn any_bytes_parse_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let _ = parse(&String::from_utf8_lossy(&bytes));
        }

        #[test]
        fn any_tokens_parse_without_panic(
            tokens in prop::collection::vec(
                prop::sample::select(vec![
                    "{", "}", "(", ")", "[", "]", "$", ":", "!", "=", "...", "on", "query", "a",
                    "mutation", "fragment", "1", "-1.5e3", "\"\\u00e9\"", "\"", "#", "\n", "@",
                    "\\", "\u{feff}", "é",
                ]),
                0..200,
            ),
        ) {
            let _ = parse(&tokens.join(" "));
            let _ = parse(&tokens.concat());
        }
    }
}
