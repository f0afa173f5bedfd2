"""Every Lua script, named, with one line on its purpose. They run on Redis 6.0 and later.

The scripts of a working memory get its head and its index as the first two keys, and begin with `opened`. They answer
with a word first: `ok`, or why not. Only what nobody expects is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha1


@dataclass(frozen=True, slots=True)
class Script:
    """A script and the digest under which Redis knows it."""

    text: str
    sha: str


def _script(*parts: str) -> Script:
    text = "".join(parts)
    return Script(text, sha1(text.encode(), usedforsecurity=False).hexdigest())


MAX_COMMAND_ARGS = 4000
"""Arguments of one command: Lua hands on 8000 at most. It is even, so that pairs stay together."""

_READ_HEAD = (
    f"""
local BLOCK = {MAX_COMMAND_ARGS}
"""
    + """
local function clock()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local LONGEST_RUN = 200  -- maximum bytes in a run id
local EXACT = 2 ^ 53  -- Lua numbers are exact integers below this
local EACH = 8  -- overhead per element, in bytes

local function whole(number)
  return number and math.floor(number) == number and math.abs(number) < EXACT
end

-- Size of an answer in bytes, including the overhead of its elements.
local function weight(answer)
  if type(answer) == 'string' then return #answer end
  if type(answer) ~= 'table' then return 0 end
  local bytes = 0
  for _, element in ipairs(answer) do bytes = bytes + EACH + #element end
  return bytes
end

-- 'ok', 'none': there is no head, 'lost': there is a head but no index, 'damaged' and which of them; then the head.
local function opened()
  local head = redis.pcall('HMGET', KEYS[1], 'run', 'fence', 'version')
  if head.err then return 'damaged', KEYS[1] end
  -- The index is never empty: its member '' tells an empty memory from a lost one.
  local index = redis.pcall('ZSCORE', KEYS[2], '')
  if type(index) == 'table' then return 'damaged', KEYS[2] end
  if not head[1] and not head[2] and not head[3] then return 'none', '', 0, 0 end
  local fence, version = tonumber(head[2] or ''), tonumber(head[3] or '')
  if not head[1] or #head[1] > LONGEST_RUN or not whole(fence) or not whole(version) then
    return 'damaged', KEYS[1]
  end
  return index and 'ok' or 'lost', head[1], fence, version
end
"""
)

_CHECK_OWNER = """
-- Nothing, if the memory is that of `run`, which has seen the version `seen`; else what to answer.
local function refused(run, top, seen)
  local state, found, fence, version = opened()
  if state == 'damaged' then return {state, found} end
  if state == 'none' then return {'lost'} end
  -- A Redis that came back with an older state knows an earlier run, or an earlier version.
  if found ~= run and fence < top then return {'lost'} end
  if found ~= run or fence > top then return {'fenced', found, string.format('%.0f', fence)} end
  if state == 'lost' or version < seen then return {'lost'} end
end
"""

_UNLINK = """
-- Delete what `names`, each after `prefix`, stand for.
local function unlink(prefix, names)
  for first = 1, #names, BLOCK do
    local block = {}
    for i = first, math.min(first + BLOCK - 1, #names) do block[#block + 1] = prefix .. names[i] end
    redis.call('UNLINK', unpack(block))
  end
end
"""

_TOUCH = """
-- Let the memory live for `life` from now on: head, index, and the keys with these ranks in the index.
local function touch(life, prefix, first, last)
  local till = clock() + life
  redis.call('PEXPIREAT', KEYS[1], till)
  redis.call('PEXPIREAT', KEYS[2], till)
  local found = redis.call('ZRANGE', KEYS[2], first, last, 'WITHSCORES')
  for i = 1, #found, 2 do
    if found[i] ~= '' then redis.call('PEXPIREAT', prefix .. found[i], math.min(till, tonumber(found[i + 1]))) end
  end
  return {'ok', redis.call('ZCARD', KEYS[2])}
end
"""

_EXECUTE = """
local life, offset = tonumber(ARGV[4]), tonumber(ARGV[5])
local seen, limit = tonumber(ARGV[3]), tonumber(ARGV[7])
local why = refused(ARGV[1], tonumber(ARGV[2]), seen)
if why then return why end
local version = tonumber(redis.call('HGET', KEYS[1], 'version'))
-- A write that was given up on may come late: what has been written since is newer.
if ARGV[6] == 'w' and seen > 0 and version ~= seen then return {'stale'} end

local HELD = {SET = 1, INCRBY = 1, INCRBYFLOAT = 1, RPUSH = 1, LPUSH = 1, HSET = 1, HINCRBY = 1, SADD = 1, ZADD = 1,
  ZINCRBY = 1}  -- writes after which a key that was there is there
local LAST = {RPUSH = 1, LPUSH = 1}
local SUMMED = {HSET = 1, HDEL = 1, SADD = 1, SREM = 1, ZADD = 1, ZREM = 1}

local now = clock()
local before, own, lost = {}, {}, {}  -- when a key ends by its own time; nil: it is not there
for i = 3, #KEYS do
  local name = string.sub(KEYS[i], offset)
  local ends = tonumber(redis.call('ZSCORE', KEYS[2], name) or nil)
  local there = redis.call('EXISTS', KEYS[i]) == 1
  if ends and ends > now then
    if not there then lost[#lost + 1] = name end
    before[i], own[i] = ends, ends
  else
    if there then redis.call('UNLINK', KEYS[i]) end
    if ends then redis.call('ZREM', KEYS[2], name) end
  end
end
if #lost > 0 then return {'lost', unpack(lost, 1, math.min(#lost, BLOCK))} end

local TOO_LARGE = 'ERR the answers exceed ' .. string.format('%.0f', limit) .. ' bytes'

-- More arguments than Lua hands on at once.
local function long(name, key, first, last)
  if not SUMMED[name] and not LAST[name] or (name == 'HSET' or name == 'ZADD') and (last - first) % 2 == 0 then
    return {err = 'ERR wrong number of arguments'}
  end
  if name == 'ZADD' then  -- all or nothing, so nothing may be wrong with a later block
    for i = first, last, 2 do
      local score = tonumber(ARGV[i])
      if not score or score ~= score then return {err = 'ERR value is not a valid float'} end
    end
  end
  local total = 0
  for at = first, last, BLOCK do
    local answer = redis.pcall(name, key, unpack(ARGV, at, math.min(at + BLOCK - 1, last)))
    if type(answer) ~= 'number' then return answer end
    total = SUMMED[name] and total + answer or answer
  end
  return total
end

local function apply(name, i, first, last, writes)
  local key = KEYS[i]
  if name == 'PTTL' then
    if not own[i] then return -2 end
    return own[i] == math.huge and -1 or own[i] - now
  end
  if name == 'PERSIST' then
    if not own[i] or own[i] == math.huge then return 0 end
    own[i] = math.huge
    return 1
  end
  local answer
  if last - first < BLOCK then
    answer = redis.pcall(name, key, unpack(ARGV, first, last))
  else
    answer = long(name, key, first, last)
  end
  if type(answer) == 'table' and answer.err or not writes then return answer end
  if name == 'SET' then
    own[i] = math.huge
  elseif name == 'PEXPIRE' then
    if answer == 1 then own[i] = tonumber(ARGV[first]) > 0 and now + tonumber(ARGV[first]) or nil end
  elseif not own[i] or not HELD[name] then
    own[i] = redis.call('EXISTS', key) == 1 and (own[i] or math.huge) or nil
  end
  if name == 'INCRBY' and math.abs(answer) >= EXACT then return redis.call('GET', key) end
  if name == 'HINCRBY' and math.abs(answer) >= EXACT then return redis.call('HGET', key, ARGV[first]) end
  return answer
end

local answers, written, wrong, bytes, at = {}, {}, nil, 0, 8
while at <= #ARGV do
  local name, i, writes, size = ARGV[at], tonumber(ARGV[at + 1]), ARGV[at + 2] == 'w', tonumber(ARGV[at + 3])
  local answer
  if name == 'GET' and bytes + (tonumber(redis.pcall('STRLEN', KEYS[i])) or 0) > limit then
    answer = {err = TOO_LARGE}
  else
    answer = apply(name, i, at + 4, at + 3 + size, writes)
    if writes and not (type(answer) == 'table' and answer.err) then written[i] = true end
    bytes = bytes + weight(answer)
    if bytes > limit then answer = {err = TOO_LARGE} end
  end
  if type(answer) == 'table' and answer.err then
    wrong = {'refused', string.sub(KEYS[i], offset), name, answer.err}
    break
  end
  answers[#answers + 1] = answer
  at = at + 4 + size
end

if next(written) then
  local till = now + life
  for i in pairs(written) do
    local name = string.sub(KEYS[i], offset)
    if own[i] then
      if own[i] ~= before[i] then redis.call('ZADD', KEYS[2], own[i], name) end
      redis.call('PEXPIREAT', KEYS[i], math.min(till, own[i]))
    elseif before[i] then
      redis.call('ZREM', KEYS[2], name)
    end
  end
  version = redis.call('HINCRBY', KEYS[1], 'version', 1)
  redis.call('PEXPIREAT', KEYS[1], till)
  redis.call('PEXPIREAT', KEYS[2], till)
end
return wrong or {'ok', version, answers}
"""

_LIST_KEYS = """
local why = refused(ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]))
if why then return why end

local prefix, limit, lost = ARGV[4], tonumber(ARGV[5]), {}
local TOO_LARGE = {'refused', '', 'KEYS', 'ERR the key names exceed ' .. string.format('%.0f', limit) .. ' bytes'}
if redis.call('ZCARD', KEYS[2]) * EACH > limit then return TOO_LARGE end
local names = redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. string.format('%.0f', clock()), '+inf')
if weight(names) > limit then return TOO_LARGE end
for first = 1, #names, BLOCK do
  local block = {}
  for i = first, math.min(first + BLOCK - 1, #names) do
    if names[i] ~= '' then block[#block + 1] = prefix .. names[i] end
  end
  if #block > 0 and redis.call('EXISTS', unpack(block)) < #block then
    for _, key in ipairs(block) do
      if redis.call('EXISTS', key) == 0 then lost[#lost + 1] = string.sub(key, #prefix + 1, #prefix + LONGEST_RUN) end
    end
  end
end
if #lost > 0 then return {'lost', unpack(lost, 1, math.min(#lost, BLOCK))} end
return {'ok', names}
"""

_READ = """
local prefix, limit, first, last = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local state, run, fence, version = opened()
if state == 'damaged' then return cmsgpack.pack({state, run}) end
local GET = {string = {'GET'}, list = {'LRANGE', 0, -1}, hash = {'HGETALL'}, set = {'SMEMBERS'},
  zset = {'ZRANGE', 0, -1, 'WITHSCORES'}}
local COUNT = {list = 'LLEN', hash = 'HLEN', set = 'SCARD', zset = 'ZCARD', string = 'STRLEN'}
local now, total, items, bytes = clock(), 0, {}, 0

-- The content of a key; nil and true if it exceeds the remaining limit.
local function content_of(key, kind)
  local count = redis.call(COUNT[kind], key)
  if bytes + count * (kind == 'string' and 1 or EACH) > limit then return nil, true end
  local content = redis.call(GET[kind][1], key, unpack(GET[kind], 2))
  local more = weight(content)
  if bytes + more > limit then return nil, true end
  bytes = bytes + more
  return content
end

if state == 'ok' then
  total = redis.call('ZCARD', KEYS[2])
  local asked = last < 0 and total or math.min(total, last - first + 1)
  local found = asked * EACH <= limit and redis.call('ZRANGE', KEYS[2], first, last, 'WITHSCORES')
  bytes = found and weight(found) or limit + 1
  if bytes > limit then  -- the key names alone exceed the limit
    found, total = {}, 2
    items[1] = {'', '+inf', 'large'}
  end
  for i = 1, #found, 2 do
    if found[i] ~= '' then
      local key = prefix .. found[i]
      local kind, content, large = redis.call('TYPE', key).ok, nil, nil
      if GET[kind] then content, large = content_of(key, kind) end
      items[#items + 1] = {found[i], found[i + 1], large and 'large' or kind, content}
    end
  end
end
return cmsgpack.pack({state, now, run, string.format('%.0f', fence), version, total, items})
"""

_ADOPT = """
local run, top, version, life, prefix, last = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]),
  ARGV[5], ARGV[6]
local state, found, fence, current = opened()
if state == 'damaged' then return {state, found} end
if fence and fence > top then return {'fenced', found, string.format('%.0f', fence)} end
if state ~= 'ok' or current ~= version then return {'changed'} end
redis.call('HSET', KEYS[1], 'run', run, 'fence', ARGV[2])
return touch(life, prefix, 0, last)
"""

_RETAIN = """
local state, found, fence = opened()
if state == 'damaged' then return {state, found} end
if state ~= 'ok' or found ~= ARGV[1] and fence >= tonumber(ARGV[2]) then return {'other'} end
return touch(tonumber(ARGV[3]), ARGV[4], ARGV[5], ARGV[6])
"""

_FORGET = """
local state, found, fence = opened()
if state == 'damaged' then return {state, found} end
if state == 'none' or found ~= ARGV[1] and fence >= tonumber(ARGV[2]) then return {'other'} end
unlink(ARGV[3], redis.call('ZRANGE', KEYS[2], 0, -1))
redis.call('UNLINK', KEYS[1], KEYS[2])
return {'ok'}
"""

_STAGE = """
local PUT = {string = 'SET', list = 'RPUSH', hash = 'HSET', set = 'SADD', zset = 'ZADD'}
local SIZE = {list = 'LLEN', hash = 'HLEN', set = 'SCARD', zset = 'ZCARD'}
local prefix, life = ARGV[1], ARGV[2]
for _, part in ipairs(cmsgpack.unpack(ARGV[3])) do
  local name, kind, ends, staged, elements = unpack(part)
  local key = prefix .. name
  if staged > 0 and redis.call(SIZE[kind], key) ~= staged then return {'incomplete'} end
  redis.call(PUT[kind], key, unpack(elements))
  redis.call('PEXPIRE', key, life)
  redis.call('ZADD', KEYS[1], ends, name)
end
redis.call('ZINCRBY', KEYS[1], 1, '')
redis.call('PEXPIRE', KEYS[1], life)
return {'ok'}
"""

_SWAP = """
local run, top, life, prefix, staged = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4], ARGV[5]
local steps, expected = tonumber(ARGV[6]), tonumber(ARGV[7])
local names = redis.call('ZRANGE', KEYS[3], 0, -1)
local function refuse(...)
  unlink(staged, names)
  redis.call('UNLINK', KEYS[3])
  return {...}
end

local state, found, fence, version = opened()
if state == 'damaged' then return refuse(state, found) end
if fence > top and ARGV[9] ~= '1' then return refuse('fenced', found, string.format('%.0f', fence)) end
-- One that was given up on may come late: what has been written since is newer.
local seen = tonumber(ARGV[8])
if found == run and seen and version ~= seen then return refuse('stale') end
local there = 0
for first = 1, #names, BLOCK do
  local block = {}
  for i = first, math.min(first + BLOCK - 1, #names) do block[#block + 1] = staged .. names[i] end
  there = there + redis.call('EXISTS', unpack(block))
end
if there ~= expected or tonumber(redis.call('ZSCORE', KEYS[3], '') or 0) ~= steps then return refuse('incomplete') end

local now = clock()
local till = now + life
unlink(prefix, redis.call('ZRANGE', KEYS[2], 0, -1))
redis.call('UNLINK', KEYS[2])
local ends = redis.call('ZRANGE', KEYS[3], 0, -1, 'WITHSCORES')
for i = 1, #ends, 2 do
  local name, score = ends[i], tonumber(ends[i + 1])
  if name ~= '' and score <= now then
    redis.call('UNLINK', staged .. name)
    redis.call('ZREM', KEYS[3], name)
  elseif name ~= '' then
    redis.call('RENAME', staged .. name, prefix .. name)
    redis.call('PEXPIREAT', prefix .. name, math.min(till, score))
  end
end
if steps > 0 then redis.call('RENAME', KEYS[3], KEYS[2]) end
redis.call('ZADD', KEYS[2], '+inf', '')
redis.call('PEXPIREAT', KEYS[2], till)
if state == 'none' then
  -- Never one that this memory has had before: whoever read it then must not take this for the same.
  local time = redis.call('TIME')
  version = time[1] * 1000000 + time[2]
end
redis.call('HSET', KEYS[1], 'run', run, 'fence', ARGV[2], 'version', string.format('%.0f', version + 1))
redis.call('PEXPIREAT', KEYS[1], till)
return {'ok', version + 1}
"""

_APPEND_CHUNKS = """
for first = 2, #ARGV, 4000 do
  redis.call('RPUSH', KEYS[1], unpack(ARGV, first, math.min(first + 3999, #ARGV)))
end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return {'ok'}
"""

_PUT_SNAPSHOT = """
local chunks, meta, staged = KEYS[1], KEYS[2], KEYS[3]
local life, digest, order, count, manifest = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
local kept = redis.pcall('HGET', meta, 'order')
local newest = type(kept) == 'string' and tonumber(kept)
if newest and newest > tonumber(order) then
  redis.call('UNLINK', staged)
  return {'newer'}
end
if redis.call('LLEN', staged) ~= count then
  redis.call('UNLINK', staged)
  return {'incomplete'}
end
redis.call('UNLINK', chunks, meta)
if count > 0 then
  redis.call('RENAME', staged, chunks)
  redis.call('PEXPIRE', chunks, life)
end
redis.call('HSET', meta, 'digest', digest, 'order', order, 'chunks', count, 'manifest', manifest)
redis.call('PEXPIRE', meta, life)
return {'ok'}
"""

_GET_SNAPSHOT = """
local limit, bytes, chunks = tonumber(ARGV[1]), 0, {}
for _, field in ipairs({'digest', 'order', 'chunks', 'manifest'}) do
  local length = redis.pcall('HSTRLEN', KEYS[2], field)
  if type(length) == 'table' then return {'damaged', KEYS[2]} end
  bytes = bytes + length
end
if bytes > limit then return {'large', KEYS[2]} end
local meta = redis.call('HMGET', KEYS[2], 'digest', 'order', 'chunks', 'manifest')
local count = redis.pcall('LLEN', KEYS[1])
if type(count) == 'table' then return {'damaged', KEYS[1]} end
if bytes + count * 8 > limit then return {'large', KEYS[1]} end
for i = 0, count - 1, 16 do
  for _, chunk in ipairs(redis.call('LRANGE', KEYS[1], i, i + 15)) do
    bytes = bytes + #chunk + 8
    if bytes > limit then return {'large', KEYS[1]} end
    chunks[#chunks + 1] = chunk
  end
end
if redis.call('EXISTS', KEYS[1], KEYS[2]) == 0 then return {'none'} end
return {'ok', meta, chunks}
"""

_GET_DIGEST = """
local length = redis.pcall('HSTRLEN', KEYS[1], 'digest')
if type(length) == 'table' or length == 0 or length > tonumber(ARGV[1]) then return {'none'} end
return {'ok', redis.call('HGET', KEYS[1], 'digest')}
"""

EXECUTE = _script(_READ_HEAD, _CHECK_OWNER, _EXECUTE)
"""Do the owner's commands, and keep the books: the index, the times to live, the version."""

LIST_KEYS = _script(_READ_HEAD, _CHECK_OWNER, _LIST_KEYS)
"""The keys that are there, and whether some are lost."""

READ = _script(_READ_HEAD, _READ)
"""The head, and the contents of the keys with some ranks in the index, as MessagePack: read in a fraction of the time
that thousands of answers in the protocol's own form take."""

ADOPT = _script(_READ_HEAD, _TOUCH, _ADOPT)
"""Change the owner if the version is still the one that was read."""

RETAIN = _script(_READ_HEAD, _TOUCH, _RETAIN)
"""Let the owner's memory live for a time from now on."""

FORGET = _script(_READ_HEAD, _UNLINK, _FORGET)
"""Delete the owner's memory."""

STAGE = _script(_STAGE)
"""Put values, which come as MessagePack, beside the memory, for a while."""

SWAP = _script(_READ_HEAD, _UNLINK, _SWAP)
"""Put what was staged, if it is complete, in the place of the memory, and change the owner."""

APPEND_CHUNKS = _script(_APPEND_CHUNKS)
"""Put chunks of a snapshot beside it, for a while."""

PUT_SNAPSHOT = _script(_PUT_SNAPSHOT)
"""Put the staged chunks, if they are complete, in the place of an older snapshot."""

GET_SNAPSHOT = _script(_GET_SNAPSHOT)
"""A snapshot's fields and chunks at one instant."""

GET_DIGEST = _script(_GET_DIGEST)
"""A snapshot's recorded digest, unverified."""
