"""Regular expressions for the formats of strings in JSON schemas that are enforced in text without quotes.

Each allows a part of what its standard allows, and nothing else: RFC 3339 for times, RFC 5321 for mail, RFC
1123 for hosts, RFC 4291 for IPv6, RFC 3986 for URIs, RFC 9562 for UUIDs.
"""

_DATE = (
    r"(?:[12][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[12][0-9](?:0[48]|[2468][048]|[13579][26])|(?:1[26]|2[048])00)-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_N = r"[0-9]{1,9}"
_DURATION_TIME = rf"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_DURATION_DATE = rf"(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,60}[A-Za-z0-9])?"
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"  # at most 251 characters; RFC 1123 allows 253
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,20}"
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_H16 = r"[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    (
        rf"(?:{_H16}:){{7}}{_H16}",
        *(rf"(?:{_H16}:){{{n}}}(?::{_H16}){{1,{7 - n}}}" for n in range(1, 7)),
        rf":(?::{_H16}){{1,7}}",
        rf"(?:{_H16}:){{1,7}}:",
        "::",
        rf"::(?:{_H16}:){{0,5}}{_IPV4}",
        rf"(?:{_H16}:){{6}}{_IPV4}",
    )
)
_PCHAR = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_URI = (
    rf"[A-Za-z][A-Za-z0-9+.-]*:(?://(?:[A-Za-z0-9._~-]*@)?[A-Za-z0-9._~-]*(?::[0-9]{{1,5}})?(?:/{_PCHAR}*)*"
    rf"|/?{_PCHAR}+(?:/{_PCHAR}*)*)(?:\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?"
)
FORMAT_PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": rf"P(?:{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME}|{_N}W)",
    "email": rf"{_ATOM}(?:\.{_ATOM}){{0,2}}@{_HOSTNAME}",
    "hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": f"(?:{_IPV6})",
    "uri": _URI,
    "uuid": r"[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}",
}
"""Regular expressions of a whole text, by the format as `read_schema` writes it."""
FORMAT_LENGTHS: dict[str, tuple[int, int | None]] = {
    "date": (10, 10),
    "time": (9, 24),
    "date-time": (20, 35),
    "duration": (3, 62),
    "email": (3, 314),
    "hostname": (1, 251),
    "ipv4": (7, 15),
    "ipv6": (2, 45),
    "uri": (3, None),
    "uuid": (36, 36),
}
"""Shortest and longest text that each of them matches."""
